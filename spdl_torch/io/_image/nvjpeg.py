"""JPEG decoding on the GPU: nvJPEG through torchvision, then a resize on the GPU."""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.nn.functional import interpolate

from spdl_torch.errors import DecodeError, UnsupportedOptionError

from .._source import read_sources, source_name
from .._transfer import cuda
from .._transfer.transfer import check_device_config
from . import kernel
from .decode import header_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from .._source import Source
    from .._transfer.transfer import CUDAConfig

__all__ = ["load_image_batch_nvjpeg"]

_RGB = 3  # torchvision's ImageReadMode.RGB

# torchvision has one decoder a process, behind a lock of its own, so nothing is lost by this one.
_one_at_a_time = threading.Lock()


def load_image_batch_nvjpeg(
    srcs: Sequence[Source],
    *,
    device_config: CUDAConfig,
    width: int,
    height: int,
    pix_fmt: Literal["rgb"] = "rgb",
) -> Tensor:
    """Decode JPEGs on the GPU and resize them there (bilinear, antialiased).

    An op for one pipeline thread: batches are decoded one at a time, whichever threads call, on
    a stream of their own. Blocks, without the GIL, until the batch is there.

    Args:
        srcs: JPEGs as in :func:`decode_image`, at least one.
        device_config: of :func:`cuda_config`.
        width, height: of the result, in pixels.
        pix_fmt: only ``"rgb"``, planes of red, green and blue.

    Returns: uint8, shape (N, 3, height, width), on the device, contiguous. Within a few levels
        of :func:`load_image_batch`: nvJPEG rounds and upsamples colours in its own way.
    Raises:
        DecodeError: an image is no JPEG, or none that nvJPEG takes.
        OSError: a path cannot be read.
        RuntimeError: torch finds no CUDA or no such device, or torchvision has no nvJPEG.
        UnsupportedOptionError: another ``pix_fmt``.
    """
    check_device_config(device_config, "load_image_batch_nvjpeg")
    if pix_fmt != "rgb":
        raise UnsupportedOptionError(
            f"load_image_batch_nvjpeg: pix_fmt must be 'rgb', got {pix_fmt!r}. Convert the batch "
            "after loading."
        )
    if width < 1 or height < 1:
        raise ValueError(f"width and height must be >= 1, got {width=}, {height=}.")
    if not srcs:
        raise ValueError("srcs must hold at least one image, got none.")
    device = cuda.resolve(device_config.device)
    names = [source_name(src) for src in srcs]
    data = read_sources(srcs)
    for content, name in zip(data, names, strict=True):
        _check_jpeg(content, name)
    _check_operator()
    with _one_at_a_time:
        backend: cuda.Backend = cuda.CudaBackend(device, device_config.stream, use="decode")
        with backend.on_copy_stream():
            # The decoder writes on a stream of its own into memory of this one and does not wait
            # for what this one still does with that memory: let it be idle.
            backend.record().synchronize()
            shape = len(data), 3, height, width
            batch = backend.empty(math.prod(shape)).view(shape)
            for place, image in enumerate(_decode(data, names, backend.device)):
                _resize_into(batch[place], image)
            event = backend.record()
        event.synchronize()
    backend.hand_over(event, [batch])
    return batch


def _check_jpeg(content: Tensor, name: str) -> None:
    if content.numel() == 0:
        raise DecodeError(f"{name}: the file is empty (0 bytes).")
    if bytes(content[:2].tolist()) != b"\xff\xd8":
        raise DecodeError(
            f"{name}: not a JPEG, the only format that nvJPEG decodes. Use load_image_batch."
        )
    header_size(content, name)  # refuses sizes that the bytes cannot hold


def _check_operator() -> None:
    if not kernel.has_nvjpeg():
        raise RuntimeError(
            "load_image_batch_nvjpeg needs torchvision with nvJPEG, which this one was built "
            "without. Use load_image_batch(device_config=...)."
        )


def _decode(data: list[Tensor], names: list[str], device: torch.device) -> list[Tensor]:
    try:
        images: list[Tensor] = _decode_jpegs(data, device)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        _name_the_bad_one(data, names, device)
        raise  # each alone is good: not the data's fault
    return images


def _name_the_bad_one(data: list[Tensor], names: list[str], device: torch.device) -> None:
    for content, name in zip(data, names, strict=True):
        try:
            _decode_jpegs([content], device)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise DecodeError(f"{name}: nvJPEG cannot decode it: {reason}") from error


def _decode_jpegs(data: list[Tensor], device: torch.device) -> Any:
    return torch.ops.image.decode_jpegs_cuda(data, _RGB, device)


def _resize_into(target: Tensor, image: Tensor) -> None:
    """Resize one picture, uint8 (3, H, W); the antialiased kernel takes floats alone."""
    size = target.shape[1], target.shape[2]
    resized = interpolate(
        image.unsqueeze(0).float(), size, mode="bilinear", antialias=True, align_corners=False
    )
    target.copy_(resized[0].round_().clamp_(0, 255))
