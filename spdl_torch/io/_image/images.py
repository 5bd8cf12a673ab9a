"""Load images at one size: one, or a whole batch in calls that do not hold the GIL."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch

from spdl_torch.errors import DecodeError, UnsupportedOptionError
from spdl_torch.handlers import unless_of_handler

from .._options import check_size, fitted_size
from .._remote import is_url
from .._source import Source, read_source, source_name
from .._storage import Storage, room_for
from .._transfer.transfer import CUDAConfig, check_device_config, to_device
from . import decode, kernel, libjpeg_turbo
from .geometry import Crop, CropFunction, checked_crop

if TYPE_CHECKING:
    from torch import Tensor

    from .kernel import PicturePlan

    Sizes = dict[int, tuple[int, int]]
    """The height and width of pictures by their places in the batch."""

T = TypeVar("T")

# Parts that are decoded before the kernel resizes them: 10 MB of photographs, however large the
# batch is.
_PARTS_AT_ONCE = 32


def image_loader(path: str | os.PathLike[str]) -> Tensor:
    """Decode an image file for ``torchvision.datasets.ImageFolder(root, loader=image_loader)``.

    The transform gets a tensor instead of a Pillow image, so it must be one of
    ``torchvision.transforms.v2`` or another that takes tensors.

    Returns and raises as :func:`decode_image`.
    """
    return decode.decode_image(path)


def load_image(
    src: Source,
    width: int | None = None,
    height: int | None = None,
    *,
    crop: CropFunction | None = None,
    scaled: bool = False,
    device_config: CUDAConfig | None = None,
    name: str | None = None,
) -> Tensor:
    """Decode and resize one image (bilinear, antialiased, as Pillow does).

    ``load_image(src, 64, 48)`` -> (3, 48, 64); ``load_image(src)`` -> (3, H, W)

    Args:
        src: as in :func:`decode_image`.
        width, height: of the result, in pixels. If one is None, the shape is kept; if both are,
            the size.
        crop, scaled, device_config: as in :func:`load_image_batch`.
        name: of the source in errors; None: its path, or ``<bytes>``.

    Returns: uint8, shape (3, height, width), rows of RGB pixels in memory (channels_last).
    Raises: as :func:`load_image_batch`.
    """
    _check_request([src], width, height, device_config, "load_image")
    image = _load([src], width, height, crop, scaled=scaled, names=[name] if name else ())[0]
    return image if device_config is None else to_device(image, device_config)


def load_image_batch(
    srcs: Sequence[Source],
    *,
    width: int | None,
    height: int | None,
    crop: CropFunction | None = None,
    pix_fmt: Literal["rgb24"] = "rgb24",
    device_config: CUDAConfig | None = None,
    storage: Storage | None = None,
    strict: bool = True,
    scaled: bool = False,
) -> Tensor:
    """Decode and resize a batch of images (bilinear, antialiased, as Pillow does).

    Reading, decoding, resizing and copying into the batch run without the GIL.

    Args:
        srcs: as in :func:`decode_image`, at least one.
        width, height: of the result, in pixels. If one is None, the shape is kept; if both are,
            the size. Then all pictures must agree.
        crop: called with each picture's height and width in turn, before anything is decoded;
            returns the box to resize. None takes the whole picture.
        device_config: of :func:`cuda_config`: where the batch goes, as by
            :func:`transfer_tensor`. None: it stays on the CPU.
        storage: of :func:`cpu_storage`: memory for the batch, reused by the next call; or of
            :func:`batch_storage`: where a loader takes it without another copy.
        strict: False leaves images out that cannot be decoded.
        scaled: decode JPEGs at a half, a quarter or an eighth of their size, where the crop still
            has the pixels wanted: several times as fast for photographs of many megapixels. Pixels
            differ from those of the whole picture, by 1 level (of 255) on average and by tens at
            single sharp edges. Other pictures, and JPEGs less than twice as large as wanted, are
            loaded as without it.

    Returns: uint8, shape (N, height, width, 3), contiguous.
    Raises:
        DecodeError: an image cannot be decoded; with ``strict=False``, none of them can; the
            pictures differ in size, and none is given.
        OSError: a path cannot be read.
        RuntimeError: ``device_config`` names a device that is not there.
        TypeError: a size that is no int.
        UnsupportedOptionError: another ``pix_fmt``, or a ``device_config`` that is none.
        ValueError: a size below 1; ``storage`` is too small.
    """
    _check_request(srcs, width, height, device_config, "load_image_batch")
    if pix_fmt != "rgb24":
        raise UnsupportedOptionError(
            f"load_image_batch: pix_fmt must be 'rgb24', got {pix_fmt!r}. Use demux_image, "
            "decode_packets and convert_frames for other formats."
        )
    batch = _load(srcs, width, height, crop, scaled=scaled, strict=strict, storage=storage)
    batch = batch.permute(0, 2, 3, 1)
    return batch if device_config is None else to_device(batch, device_config)


def load_planned(
    sources: Sequence[Source],
    plan: Callable[[Sizes], Sequence[PicturePlan]],
    height: int | None,
    width: int | None,
    *,
    scaled: bool = False,
    strict: bool = True,
    storage: Storage | None = None,
    names: Sequence[str] = (),
) -> Tensor:
    """Load a batch; ``plan(sizes)`` says what becomes of each picture: height and width by its
    place among the sources, in their order. It is called before anything is decoded.

    height, width: of the batch; None: the size that all the plans resize to.
    scaled: as for :func:`load_image_batch`.
    names: of the sources in errors; none: their own.
    Returns: uint8, shape (N, 3, height, width), CPU, channels_last memory. N is smaller than
        ``len(sources)`` only if ``strict`` is False.
    Raises: as :func:`load_image_batch`.
    """
    names = names or [*map(source_name, sources)]
    # Keep our own calls from any mode that the caller has entered: a loader's costs 1 µs a call.
    with torch._C.DisableTorchFunction():
        data, sizes = _measure(read_sources(sources), names, strict)
    plans = dict(zip(sizes, plan(sizes), strict=True))
    if height is None or width is None:
        height, width = _one_size(plans, names)
    size = height, width
    pictures = {k: (data[k], plans[k], names[k]) for k in plans}

    def decoded(k: int) -> tuple[Tensor, PicturePlan, str]:
        image, fitted = decode.prepared(*pictures[k], scaled=scaled, decoder=None)
        return image, fitted, names[k]

    with torch._C.DisableTorchFunction():
        try:
            return _fill([*pictures.values()], size, storage, scaled=scaled)
        # One is bad: take them one by one to learn which.
        except unless_of_handler(RuntimeError, DecodeError):
            found = _without_bad(pictures, decoded, len(names), strict)
            return _fill([*found.values()], size, storage, scaled=scaled)


def read_sources(sources: Sequence[Source]) -> list[Tensor]:
    """Read every source; all paths together in one call that does not hold the GIL.

    Returns: one uint8 tensor of one dimension per source, CPU.
    Raises: OSError: a path cannot be read; TypeError: not a source.
    """
    paths = [os.fspath(s) for s in sources if isinstance(s, str | os.PathLike) and not is_url(s)]
    if len(paths) == len(sources) and paths:
        try:
            return kernel.read_files(paths)
        except unless_of_handler(RuntimeError, AttributeError):
            pass  # a path is missing or empty (found below), or torchvision has no reader
    return [read_source(source) for source in sources]


def _load(
    srcs: Sequence[Source],
    width: int | None,
    height: int | None,
    crop: CropFunction | None,
    **options: Any,
) -> Tensor:
    def plan(size: tuple[int, int]) -> PicturePlan:
        box = checked_crop(crop(*size), *size) if crop else Crop(0, 0, *size)
        new_width, new_height = fitted_size(width, height, box.width, box.height)
        return kernel.PicturePlan(size, box[:4], resized=(new_height, new_width), flip=box.flip)

    def plans(sizes: Sizes) -> list[PicturePlan]:
        return [plan(size) for size in sizes.values()]

    return load_planned(srcs, plans, height, width, **options)


def _check_request(
    srcs: Sequence[Source],
    width: int | None,
    height: int | None,
    device_config: CUDAConfig | None,
    where: str,
) -> None:
    if device_config is not None:
        check_device_config(device_config, where)
    check_size(width, height, where)
    if not len(srcs):
        raise ValueError("srcs must hold at least one image, got none.")


def _one_size(plans: dict[int, PicturePlan], names: Sequence[str]) -> tuple[int, int]:
    (first, plan), *others = plans.items()
    for k, other in others:
        if other.resized != plan.resized:
            one, two = ("{1}x{0}".format(*each.resized) for each in (plan, other))
            raise DecodeError(
                f"the pictures differ in size: {names[first]} is {one}, {names[k]} is {two}. Give "
                "width and height."
            )
    return plan.resized


def _without_bad(
    places: Iterable[int], load: Callable[[int], T], num_given: int, strict: bool
) -> dict[int, T]:
    """Return what ``load`` returns for each picture of a batch of ``num_given``; unless ``strict``,
    without those that cannot be decoded. Raises: DecodeError: none is left."""
    loaded: dict[int, T] = {}
    errors: list[Exception] = []
    for place in places:
        try:
            loaded[place] = load(place)
        # Warnings, as of too many pixels, where the program made them errors.
        except (DecodeError, Warning) as error:
            if strict:
                raise
            errors.append(error)
    if not loaded:
        raise DecodeError(
            f"none of the {num_given} images can be decoded; one of the reasons: {errors[0]}"
        ) from errors[0]
    return loaded


def _measure(
    data: list[Tensor], names: Sequence[str], strict: bool
) -> tuple[dict[int, Tensor], Sizes]:
    """Find every picture's size by its header; decode those that the kernel could not.

    Returns: bytes or decoded picture, and height and width, by place in the batch.
    """

    def measured(k: int) -> tuple[Tensor, tuple[int, int]]:
        content, name = data[k], names[k]
        size = decode.header_size(content, name)
        if size is None:
            content = decode.decode_tensor(content, name)
            size = content.shape[1], content.shape[2]
        return content, size

    found = _without_bad(range(len(data)), measured, len(names), strict)
    contents = {k: content for k, (content, _) in found.items()}
    return contents, {k: size for k, (_, size) in found.items()}


def _fill(
    pictures: list[tuple[Tensor, PicturePlan, str]],
    size: tuple[int, int],
    storage: Storage | None,
    *,
    scaled: bool,
) -> Tensor:
    """Return a batch of pictures, each given by bytes or pixels, plan and name."""
    # Rows of RGB pixels, seen as planes: channels_last.
    batch = room_for((len(pictures), *size, 3), storage).permute(0, 3, 1, 2)
    decoder, num_at_once = decode.kernels_decoder(), len(pictures)
    if decoder is None:  # whole pictures of a batch may be more than there is memory
        num_at_once = 1
    elif scaled or libjpeg_turbo.find_library() is not None:
        num_at_once = _PARTS_AT_ONCE
    for start in range(0, len(pictures), num_at_once):
        some = pictures[start : start + num_at_once]
        found = [decode.prepared(*each, scaled=scaled, decoder=decoder) for each in some]
        images, plans = map(list, zip(*found, strict=True))
        kernel.fill_batch(images, plans, batch[start : start + num_at_once], decoder)
    return batch
