"""JPEG decoding on the GPU: nvJPEG, then crop, resize and flip on the GPU.

nvJPEG does not take every picture: JPEGs with four inks (ImageNet has some), arithmetic coding and
other formats. Those are decoded on the CPU and go through the same crop, resize and flip.
"""

from __future__ import annotations

import functools
import importlib
import math
import re
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from spdl_torch.engine.failures import attach_note
from spdl_torch.errors import DecodeError, UnsupportedOptionError

from .._sizes import check_size
from .._source import source_name
from .._transfer import cuda
from .._transfer.transfer import check_device_config
from . import kernel
from .batch_resize import resize_crops
from .decode import decode_tensor, header_size
from .geometry import Crop, check_crop_function, checked_crop
from .header import jpeg_components
from .reading import read_sources

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from .._source import Source
    from .._transfer.transfer import CUDAConfig
    from .geometry import CropFunction

_RGB = 3  # torchvision's ImageReadMode.RGB

# Both libraries have a single decoder behind a lock of their own, so this one costs nothing.
_one_at_a_time = threading.Lock()


def load_image_batch_nvjpeg(
    srcs: Sequence[Source],
    *,
    device_config: CUDAConfig,
    width: int,
    height: int,
    crop: CropFunction | None = None,
    pix_fmt: Literal["rgb"] = "rgb",
) -> Tensor:
    """Decode JPEGs on the GPU, and crop, resize (bilinear, antialiased) and flip them there.

    An op for one pipeline thread: batches are decoded one at a time, whichever threads call, on
    a stream of their own. Blocks, without the GIL, until the batch is there. Pictures that nvJPEG
    does not take are decoded on the CPU: JPEGs with four components, and all other formats.

    Args:
        srcs: images as in :func:`decode_image`, at least one.
        device_config: of :func:`cuda_config`.
        width, height: of the result, in pixels.
        crop: as in :func:`load_image_batch`, such as :func:`random_resized_crop`.
        pix_fmt: only ``"rgb"``, planes of red, green and blue.

    Returns: uint8, shape (N, 3, height, width), on the device, contiguous. Within a few levels
        of :func:`load_image_batch`: nvJPEG rounds and upsamples colours in its own way.
    Raises:
        DecodeError: the CPU cannot decode an image, either.
        OSError: a path cannot be read.
        RuntimeError: torch finds no CUDA or no such device, neither torchvision nor torchcodec has
            nvJPEG, or the device fails.
        torch.OutOfMemoryError: the device has too little memory.
        UnsupportedOptionError: another ``pix_fmt``.
        TypeError: a size that is no int; ``crop`` is no function, or returns no :class:`Crop`.
        ValueError: a size below 1; ``crop`` returns a box outside the picture.
    """
    check_device_config(device_config, "load_image_batch_nvjpeg")
    if pix_fmt != "rgb":
        raise UnsupportedOptionError(
            f"load_image_batch_nvjpeg: pix_fmt must be 'rgb', got {pix_fmt!r}. Convert the batch "
            "after loading."
        )
    check_size(width, height, "load_image_batch_nvjpeg", may_be_none=False)
    check_crop_function(crop, "load_image_batch_nvjpeg")
    if not srcs:
        raise ValueError("srcs must hold at least one image, got none.")
    device = cuda.resolve(device_config.device)
    decode = gpu_decoder()
    names = [source_name(src) for src in srcs]
    pictures = [_measured(*each) for each in zip(read_sources(srcs), names, strict=True)]
    boxes = [box_of(crop, picture) for picture in pictures]
    with _one_at_a_time:
        backend: cuda.Backend = cuda.CudaBackend(device, device_config.stream, use="decode")
        with backend.on_copy_stream():
            # The decoder writes on a stream of its own into memory allocated on this one, without
            # waiting for this stream's earlier work on that memory: let this stream run idle.
            backend.record().synchronize()
            images = _decoded(pictures, decode, backend)
            batch = _resized(images, boxes, (height, width), backend)
            event = backend.record()
        event.synchronize()
    backend.hand_over(event, [batch])
    return batch


@dataclass(slots=True, eq=False)
class _Picture:
    """A picture: coded bytes for the GPU, and its pixels once it is decoded, here or there."""

    name: str
    coded: Tensor
    size: tuple[int, int]
    pixels: Tensor | None


def _measured(content: Tensor, name: str) -> _Picture:
    """Return the picture with its height and width, decoded if nvJPEG does not take it."""
    if content.numel() and jpeg_components(content.numpy().data) in (1, 3):
        size = header_size(content, name)  # refuses sizes that the bytes cannot hold
        if size is not None:
            return _Picture(name, content, size, None)
    pixels = decode_tensor(content, name)
    return _Picture(name, content, (pixels.shape[1], pixels.shape[2]), pixels)


def box_of(crop: CropFunction | None, picture: _Picture) -> Crop:
    """Return the box that is wanted of a picture, checked; without a function all of it."""
    return checked_crop(crop(*picture.size), *picture.size) if crop else Crop(0, 0, *picture.size)


@functools.cache
def gpu_decoder() -> Callable[[list[Tensor], torch.device], list[Tensor]]:
    """Return the function that decodes JPEGs to RGB on a device.

    torchvision's (a dependency) while it still has one: it is to be removed.
    """
    if kernel.has_nvjpeg():
        return lambda data, device: list(torch.ops.image.decode_jpegs_cuda(data, _RGB, device))
    try:
        decode_jpeg = importlib.import_module("torchcodec.decoders").decode_jpeg
    # When it is imported it looks for FFmpeg, and before 0.16 it decoded no pictures.
    except (AttributeError, ImportError, OSError, RuntimeError) as error:
        raise RuntimeError(
            "load_image_batch_nvjpeg needs nvJPEG, which this torchvision was built without; "
            "torchcodec 0.16 and later have it, too. Use load_image_batch(device_config=...)."
        ) from error

    def decode(data: list[Tensor], device: torch.device) -> list[Tensor]:
        return list(decode_jpeg(data, mode="RGB", device=device))

    return decode


def _decoded(
    pictures: list[_Picture],
    decode: Callable[[list[Tensor], torch.device], list[Tensor]],
    backend: cuda.Backend,
) -> list[Tensor]:
    """Return all pictures on the device: uint8, (3, H, W)."""
    coded = [picture for picture in pictures if picture.pixels is None]
    on_device = _tried(coded, decode, backend) if coded else []
    if on_device is None:  # one of them is refused
        for each in coded:
            found = _tried([each], decode, backend)
            each.pixels = decode_tensor(each.coded, each.name) if found is None else found[0]
    else:
        for each, image in zip(coded, on_device, strict=True):
            each.pixels = image
    return [_on_device(picture, backend) for picture in pictures]


def _tried(
    pictures: list[_Picture],
    decode: Callable[[list[Tensor], torch.device], list[Tensor]],
    backend: cuda.Backend,
) -> list[Tensor] | None:
    """Return the pixels of some pictures; None = nvJPEG refuses one of them.

    Raises: RuntimeError: what is not a picture's fault, for which nobody may skip one.
    """
    try:
        return decode([each.coded for each in pictures], backend.device)
    except RuntimeError as error:
        if not _is_of_a_picture(error):
            raise
    # The decoder may have begun to write, on a stream of its own, into memory that has been given
    # back with the error: nothing else may be made there before that is over.
    backend.drain()
    return None


_FAULTS_OF_THE_LIBRARY = {
    1: "not initialized",
    5: "it could not allocate memory",
    6: "its kernels failed on the device",
    7: "it is not made for this device",
    8: "an internal error",
}
"""Values of nvjpegStatus_t; all others are about the picture."""


def _is_of_a_picture(error: RuntimeError) -> bool:
    """Return whether the picture made nvJPEG fail; if not, note on the error what did."""
    if isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError):
        return False
    message = str(error).partition("\n")[0]
    if re.search(r"CUDA error|ailed to (create|initialize|set) ", message):
        return False
    status = re.search(r": (\d+)\s*$", message)
    reason = _FAULTS_OF_THE_LIBRARY.get(int(status[1])) if status else None
    if reason is not None:
        attach_note(error, f"This is nvJPEG's own fault ({reason}), and no picture's.")
    return reason is None


def _on_device(picture: _Picture, backend: cuda.Backend) -> Tensor:
    pixels = picture.pixels
    assert pixels is not None, "guaranteed by _decoded"
    if pixels.shape[1:] != picture.size:
        raise DecodeError(
            f"{picture.name}: the header says height and width {picture.size}, the codec gave "
            f"{tuple(pixels.shape[1:])}."
        )
    if pixels.device == backend.device:
        return pixels
    return backend.empty(pixels.nbytes).view(pixels.shape).copy_(pixels)


def _resized(
    images: list[Tensor], boxes: list[Crop], size: tuple[int, int], backend: cuda.Backend
) -> Tensor:
    """Return the batch, made in a few kernels for many pictures."""
    shape = len(images), 3, *size
    batch = backend.empty(math.prod(shape)).view(shape)
    resize_crops(images, boxes, batch)
    return batch
