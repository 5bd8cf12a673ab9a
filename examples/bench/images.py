"""Photographs as datasets: one for each decoder, resized, or cropped at random and flipped.

All give uint8 pictures of 224 x 224, at Pillow's quality unless they say otherwise.
"""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from torch.nn.functional import interpolate
from torchvision.io import ImageReadMode, decode_jpeg, read_file
from torchvision.transforms import v2

from spdl_torch import ImageFolder
from spdl_torch.io import load_image_batch, random_resized_crop

from .loaders import spdl_batches
from .peers import imported

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .loaders import Batches, Work

PIXELS = 224
_SIZE = (PIXELS, PIXELS)
_CROP = v2.Compose([v2.RandomResizedCrop(PIXELS, antialias=True), v2.RandomHorizontalFlip()])


class Photographs:
    """Photographs that come one at a time, made by ``load(path, crop)``."""

    def __init__(self, paths: Sequence[str], load: Callable[[str, bool], Any], crop: bool) -> None:
        self.paths = paths
        self.load = load
        self.crop = crop

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        return self.load(self.paths[index], self.crop)


class BatchedPhotographs:
    """Photographs that come a batch at a time: one call of our kernel makes all of them. With
    ``crop`` it has RandomResizedCrop without the flip, which costs nothing."""

    thread_safe = True

    def __init__(self, paths: Sequence[str], crop: bool) -> None:
        self.paths = paths
        self.crop = random_resized_crop if crop else None

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> Any:
        """Return uint8, shape (N, 224, 224, 3)."""
        paths = [self.paths[index] for index in indices]
        return load_image_batch(paths, width=PIXELS, height=PIXELS, crop=self.crop)


def load_pillow(path: str, crop: bool = False) -> Any:
    """Load as torch's tutorials do."""
    with Image.open(path) as opened:
        image = opened.convert("RGB")
    image = _CROP(image) if crop else image.resize(_SIZE, Image.Resampling.BILINEAR)
    return v2.functional.pil_to_tensor(image)


def load_torchvision(path: str, crop: bool = False) -> Any:
    """Load the fastest way through torch's own packages: the decoder's memory is channels_last,
    for which the uint8 resize is quick."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torchvision 0.29 points to torchcodec
        image = decode_jpeg(read_file(path), mode=ImageReadMode.RGB)
    return _finish(image, crop)


def load_simplejpeg(path: str, crop: bool = False) -> Any:
    """Load with libjpeg-turbo through simplejpeg, then torch's resize."""
    pixels = imported("simplejpeg").decode_jpeg(Path(path).read_bytes(), "RGB")
    return _finish(torch.from_numpy(pixels).permute(2, 0, 1), crop)


def _finish(image: Any, crop: bool) -> Any:
    """Resize uint8 (3, H, W), channels_last memory, to 224 x 224."""
    if crop:
        return _CROP(image)
    return interpolate(image[None], _SIZE, mode="bilinear", antialias=True)[0]


def our_folder(folder: str, num_samples: int, crop: bool) -> Any:
    """Return our ImageFolder over ``num_samples`` pictures, repeating the folder's."""
    steps = _CROP.transforms if crop else [v2.Resize(_SIZE, antialias=True)]
    dataset = ImageFolder(folder, transform=v2.Compose([*steps, v2.PILToTensor()]))
    samples = dataset.samples
    dataset.samples = [samples[index % len(samples)] for index in range(num_samples)]
    return dataset


def spdl_decoding(work: Work, *, crop: bool, default: bool = False) -> Batches:
    """SPDL's own decoder in its pipeline, one batch per task.

    Resizing: ``load_image_batch``, bilinear and not padded, or with its ``default`` filter
    (bicubic, padded). Cropping: a filter for each picture, since a batch has only one filter.
    """
    load = functools.partial(_by_spdl, work.dataset.paths, crop=crop, default=default)
    return spdl_batches(work, load)


def _by_spdl(paths: Sequence[str], indices: Sequence[int], *, crop: bool, default: bool) -> Any:
    io = imported("spdl.io")
    group = [paths[index] for index in indices]
    if crop:
        return io.to_torch(io.convert_frames([_cropped_by_spdl(path) for path in group]))
    options: dict[str, Any] = {"width": PIXELS, "height": PIXELS}
    if not default:
        options["filter_desc"] = io.get_video_filter_desc(
            scale_width=PIXELS,
            scale_height=PIXELS,
            scale_algo="bilinear",
            scale_mode=None,
            pix_fmt="rgb24",
        )
    return io.to_torch(io.load_image_batch(group, **options))


def _cropped_by_spdl(path: str) -> Any:
    io = imported("spdl.io")
    packets = io.demux_image(path)
    top, left, height, width, flip = random_resized_crop(packets.height, packets.width)
    description = (
        f"crop={width}:{height}:{left}:{top},scale={PIXELS}:{PIXELS}:flags=bilinear,"
        f"{'hflip,' if flip else ''}format=rgb24"
    )
    return io.decode_packets(packets, filter_desc=description)
