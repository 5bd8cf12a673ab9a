"""Load images at one size: one, or a whole batch in calls that do not hold the GIL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from spdl_torch.errors import DecodeError, UnsupportedOptionError

from .._source import read_sources, source_name
from .._transfer.transfer import check_device_config, to_device
from . import kernel
from .codec import check_codec, decode_regions, region_library
from .decode import decode_image, decode_tensor, header_size
from .geometry import Crop

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from .._source import Source
    from .._transfer.transfer import CUDAConfig
    from .codec import Codec
    from .geometry import CropFunction
    from .kernel import Plan

__all__ = ["image_loader", "load_image", "load_image_batch", "load_planned"]

# Regions that are decoded before the kernel resizes them: 10 MB of photographs, however large the
# batch is.
_REGIONS_AT_ONCE = 32


def image_loader(path: str | os.PathLike[str]) -> Tensor:
    """Decode an image file for ``torchvision.datasets.ImageFolder(root, loader=image_loader)``.

    The transform gets a tensor instead of a Pillow image, so it must be one of
    ``torchvision.transforms.v2`` or another that takes tensors.

    Returns and raises as :func:`decode_image`.
    """
    return decode_image(path)


def load_image(
    source: Source,
    width: int,
    height: int,
    *,
    crop: CropFunction | None = None,
    codec: Codec = "auto",
) -> Tensor:
    """Decode one image and resize it (bilinear, antialiased, as Pillow does).

    Args:
        source: as in :func:`decode_image`.
        width, height: of the result, in pixels.
        crop, codec: as in :func:`load_image_batch`.

    Returns: uint8, shape (3, height, width), CPU, rows of RGB pixels in memory (channels_last).
    Raises: as :func:`decode_image`; for ``codec`` as :func:`load_image_batch`.
    """
    check_codec(codec, "load_image")
    return _load([source], width, height, crop, codec)[0]


def load_image_batch(
    sources: Sequence[Source],
    *,
    width: int,
    height: int,
    crop: CropFunction | None = None,
    pix_fmt: Literal["rgb24"] = "rgb24",
    device_config: CUDAConfig | None = None,
    strict: bool = True,
    codec: Codec = "auto",
) -> Tensor:
    """Decode and resize a batch of images (bilinear, antialiased, as Pillow does).

    Reading, decoding, resizing and copying into the batch run without the GIL.

    Args:
        sources: as in :func:`decode_image`, at least one.
        width, height: of the result, in pixels.
        crop: called with each picture's height and width in turn, before anything is decoded;
            returns the box to resize. None takes the whole picture.
        device_config: of :func:`cuda_config`: where the batch goes, as by
            :func:`transfer_tensor`. None: it stays on the CPU.
        strict: False leaves images out that cannot be decoded.
        codec: ``"libjpeg-turbo"`` decodes of a common JPEG only the region that ``crop`` wants,
            ``"torchvision"`` all of it, with the same pixels; ``"auto"`` takes the first if it is
            installed (extra ``jpeg``).

    Returns: uint8, shape (N, height, width, 3), contiguous.
    Raises:
        DecodeError: an image cannot be decoded; with ``strict=False``, none of them can.
        ImportError: ``codec`` names libjpeg-turbo, and there is none of version 3.
        OSError: a path cannot be read.
        RuntimeError: ``device_config`` names a device that is not there.
        UnsupportedOptionError: ``pix_fmt`` or ``device_config`` ask for what cannot be done.
    """
    if pix_fmt != "rgb24":
        raise UnsupportedOptionError(
            f"load_image_batch: pix_fmt must be 'rgb24', got {pix_fmt!r}. "
            f"Convert the batch after loading."
        )
    if device_config is not None:
        check_device_config(device_config, "load_image_batch")
    check_codec(codec, "load_image_batch")
    batch = _load(sources, width, height, crop, codec, strict=strict).permute(0, 2, 3, 1)
    return batch if device_config is None else to_device(batch, device_config)


def load_planned(
    sources: Sequence[Source],
    plan: Callable[[int, int, int], Plan],
    height: int,
    width: int,
    *,
    codec: Codec = "auto",
    strict: bool = True,
) -> Tensor:
    """Load a batch; ``plan(k, height, width)`` says what becomes of picture ``k`` of that size.

    The plans are made in the order of the sources, after every size is known and before anything
    is decoded.

    Returns: uint8, shape (N, 3, height, width), CPU, channels_last memory. N is smaller than
        ``len(sources)`` only if ``strict`` is False.
    Raises: as :func:`load_image_batch`.
    """
    names = [source_name(source) for source in sources]
    # None of our own calls is for a mode that the caller has entered: a loader's costs 1 µs a call.
    with torch._C.DisableTorchFunction():
        data, sizes = _measure(read_sources(sources), names, strict)
    plans = {k: plan(k, *size) for k, size in sizes.items()}
    with torch._C.DisableTorchFunction():
        try:
            return _fill(data, plans, height, width, codec)
        except RuntimeError:  # one of them is bad: take them one by one to learn which
            data = _decode_each(data, plans, names, strict)
            return _fill(data, {k: plans[k] for k in data}, height, width, "torchvision")


def _load(
    sources: Sequence[Source],
    width: int,
    height: int,
    crop: CropFunction | None,
    codec: Codec,
    *,
    strict: bool = True,
) -> Tensor:
    if width < 1 or height < 1:
        raise ValueError(f"width and height must be >= 1, got {width=}, {height=}.")
    if not sources:
        raise ValueError("sources must hold at least one image, got none.")

    def plan(_: int, image_height: int, image_width: int) -> Plan:
        size = image_height, image_width
        box = _checked(crop(*size), *size) if crop else Crop(0, 0, *size)
        return kernel.Plan(size, box[:4], resized=(height, width), flip=box.flip)

    return load_planned(sources, plan, height, width, codec=codec, strict=strict)


def _checked(crop: Crop, height: int, width: int) -> Crop:
    top, left, box_height, box_width = crop[:4]
    inside = 0 <= top < top + box_height <= height and 0 <= left < left + box_width <= width
    if not inside:
        raise ValueError(f"crop returned {crop}, outside the picture of {height=}, {width=}.")
    return crop


def _measure(
    data: list[Tensor], names: list[str], strict: bool
) -> tuple[dict[int, Tensor], dict[int, tuple[int, int]]]:
    """Find every picture's size by its header; decode those that the kernel could not.

    Returns: bytes or decoded picture, and height and width, by place in the batch.
    """
    measured: dict[int, Tensor] = {}
    sizes: dict[int, tuple[int, int]] = {}
    errors: list[DecodeError] = []
    for k, (content, name) in enumerate(zip(data, names, strict=True)):
        try:
            size = header_size(content, name)
            if size is None:
                content = decode_tensor(content, name)
                size = content.shape[1], content.shape[2]
        except DecodeError as error:
            if strict:
                raise
            errors.append(error)
            continue
        measured[k], sizes[k] = content, size
    _check_any(measured, errors, len(names))
    return measured, sizes


def _decode_each(
    data: dict[int, Tensor], plans: dict[int, Plan], names: list[str], strict: bool
) -> dict[int, Tensor]:
    decoded: dict[int, Tensor] = {}
    errors: list[DecodeError] = []
    for k, content in data.items():
        try:
            image = content if content.dim() == 3 else decode_tensor(content, names[k])
            if image.shape[1:] != plans[k].size:
                raise DecodeError(
                    f"{names[k]}: the header says height and width {plans[k].size}, "
                    f"the codec gave {tuple(image.shape[1:])}."
                )
        except DecodeError as error:
            if strict:
                raise
            errors.append(error)
        else:
            decoded[k] = image
    _check_any(decoded, errors, len(names))
    return decoded


def _check_any(images: dict[int, Tensor], errors: list[DecodeError], num_given: int) -> None:
    if not images:
        raise DecodeError(
            f"none of the {num_given} images can be decoded; one of the reasons: {errors[0]}"
        ) from errors[0]


def _fill(
    data: dict[int, Tensor], plans: dict[int, Plan], height: int, width: int, codec: Codec
) -> Tensor:
    batch = torch.empty(
        (len(data), 3, height, width),
        dtype=torch.uint8,
        device="cpu",
        memory_format=torch.channels_last,
    )
    contents, orders = list(data.values()), list(plans.values())
    library = region_library(codec)
    if library is None:
        kernel.fill_batch(contents, orders, batch)
        return batch
    for start in range(0, len(data), _REGIONS_AT_ONCE):
        part = slice(start, start + _REGIONS_AT_ONCE)
        kernel.fill_batch(*decode_regions(library, contents[part], orders[part]), batch[part])
    return batch
