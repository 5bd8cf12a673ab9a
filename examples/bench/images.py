"""Photographs as datasets: one for each decoder, resized, or cropped at random and flipped.

All give uint8 pictures of 224 x 224, at Pillow's quality unless they say otherwise.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .peers import imported, spdl_decoder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .tables import BenchOptions

PIXELS = 224
_SIZE = (PIXELS, PIXELS)


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
    """Photographs that come a batch at a time: one call of our kernel makes all of them."""

    thread_safe = True

    def __init__(self, paths: Sequence[str], crop: bool) -> None:
        self.paths = paths
        self.crop = crop

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        return load_batch([self.paths[index]], self.crop)[0]

    def __getitems__(self, indices: Sequence[int]) -> Any:
        """Return uint8, shape (N, 224, 224, 3)."""
        return load_batch([self.paths[index] for index in indices], self.crop)


def load_batch(paths: Sequence[str], crop: bool = False) -> Any:
    """Load by our batch kernel; with ``crop`` also RandomResizedCrop,
    without the flip, which costs nothing.
    """
    from spdl_torch.io import load_image_batch, random_resized_crop

    how = random_resized_crop if crop else None
    return load_image_batch(paths, width=PIXELS, height=PIXELS, crop=how)


def load_pillow(path: Any, crop: bool = False) -> Any:
    """Load as torch's tutorials do, from a path or an open file."""
    from PIL import Image
    from torchvision.transforms.functional import pil_to_tensor

    with Image.open(path) as opened:
        image = opened.convert("RGB")
    image = _random_crop()(image) if crop else image.resize(_SIZE, Image.Resampling.BILINEAR)
    return pil_to_tensor(image)


def load_torchvision(path: str, crop: bool = False) -> Any:
    """Load the fastest way through torch's own packages: the decoder's memory is channels_last,
    for which the uint8 resize is quick."""
    from torchvision.io import ImageReadMode, decode_jpeg, read_file

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torchvision 0.29 points to torchcodec
        image = decode_jpeg(read_file(path), mode=ImageReadMode.RGB)
    return _finish(image, crop)


def load_simplejpeg(path: str, crop: bool = False) -> Any:
    """Load with libjpeg-turbo through simplejpeg, then torch's resize."""
    import torch

    pixels = imported("simplejpeg").decode_jpeg(Path(path).read_bytes(), "RGB")
    return _finish(torch.from_numpy(pixels).permute(2, 0, 1), crop)


def _finish(image: Any, crop: bool) -> Any:
    """Resize uint8 (3, H, W), channels_last memory, to 224 x 224."""
    from torch.nn.functional import interpolate

    if crop:
        return _random_crop()(image)
    return interpolate(image[None], _SIZE, mode="bilinear", antialias=True)[0]


_crop_of_this_process: Any = None


def _random_crop() -> Any:
    """Return torchvision's RandomResizedCrop and flip, made once in each process."""
    global _crop_of_this_process
    if _crop_of_this_process is None:
        from torchvision.transforms import v2

        _crop_of_this_process = v2.Compose(
            [v2.RandomResizedCrop(PIXELS, antialias=True), v2.RandomHorizontalFlip()]
        )
    return _crop_of_this_process


def our_folder(folder: str, num_samples: int, crop: bool) -> Any:
    """Return our ImageFolder over ``num_samples`` pictures, repeating the folder's."""
    from torchvision.transforms import v2

    from spdl_torch import ImageFolder

    if crop:
        steps = [v2.RandomResizedCrop(PIXELS, antialias=True), v2.RandomHorizontalFlip()]
    else:
        steps = [v2.Resize(_SIZE, antialias=True)]
    transform = v2.Compose([*steps, v2.PILToTensor()])
    dataset = ImageFolder(folder, transform=transform)
    samples = dataset.samples
    dataset.samples = [samples[index % len(samples)] for index in range(num_samples)]
    return dataset


def as_it_is(batch: Any) -> Any:
    """Return the batch: a collate function for datasets that make whole batches."""
    return batch


def size_of_pair(batch: Any) -> int:
    """Return the size of a batch, of pictures or of pictures and labels; check their shape."""
    pictures = batch[0] if isinstance(batch, list | tuple) else batch
    shape = tuple(pictures.shape)
    assert shape[1:] in ((3, PIXELS, PIXELS), (PIXELS, PIXELS, 3)), shape
    return int(shape[0])


def photographs(options: BenchOptions, folder: Path, count: int = 200) -> dict[str, Any]:
    """Return as settings the user's folder of photographs, or ``count`` of our own in ``folder``;
    read once, to cache them."""
    if options.data is None:
        from spdl_torch.demo.photographs import write_photographs

        write_photographs(folder / "photographs", count)
    paths = jpegs(options.data or folder / "photographs")
    for path in paths:
        Path(path).read_bytes()
    return {"folder": str(Path(paths[0]).parents[1]), "files": len(paths)}


def photographs_for_all(options: BenchOptions, folder: Path) -> dict[str, Any]:
    """Return the same, with what SPDL's decoder needs set up; few with ``--smoke``."""
    found = photographs(options, folder, 16 if options.smoke else 200)
    # Looking for it takes a second.
    wanted = not options.smoke or any("SPDL" in name for name in options.only)
    return {**found, "no_spdl_decoder": spdl_decoder(folder) if wanted else None}


def jpegs(folder: Path | str) -> list[str]:
    """Return the JPEGs of a folder of class folders, sorted.

    Raises: SystemExit: there are none.
    """
    paths = sorted(map(str, Path(folder).glob("*/*")))
    found = [path for path in paths if path.lower().endswith((".jpg", ".jpeg"))]
    if not found:
        raise SystemExit(f"--data: {folder} must hold one folder of JPEGs per class, found none.")
    return found
