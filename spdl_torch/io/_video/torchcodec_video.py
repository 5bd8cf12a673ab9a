"""Frames of a video by torchcodec, on a GPU by its own decoder or on the CPU."""

from __future__ import annotations

import functools
import importlib
import os
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import interpolate

from .._source import read_source
from .._transfer import cuda

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from .._source import Source
    from .._transfer.transfer import CUDAConfig


SURE_FORMATS = ("mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm")
"""FFmpeg's names of the containers whose times of display torchcodec reads. In others, such as AVI
with B-frames, it may give another frame under the time that was asked for."""


def check_decoder(decoder: object, where: str) -> None:
    """Check ``decoder=`` of function ``where``. Raises: ValueError: there is no such decoder."""
    if decoder not in ("ffmpeg", "torchcodec"):
        raise ValueError(f"{where}: decoder must be 'ffmpeg' or 'torchcodec', got {decoder!r}.")


def check_torchcodec(config: CUDAConfig | None) -> None:
    """Check that torchcodec can decode where it is to.

    Raises: ImportError: torchcodec or FFmpeg's libraries are not installed; RuntimeError: torch
        finds no CUDA or no such device, or this torchcodec was built without CUDA.
    """
    try:
        version = loaded_version()
    except (ImportError, OSError, RuntimeError) as error:
        raise ImportError(
            "decoder='torchcodec' needs torchcodec and FFmpeg's shared libraries: "
            f"{_first_line(error)} Install the extra: pip install 'spdl_torch[torchcodec]'; and "
            "FFmpeg, for instance by conda or the system's package manager."
        ) from error
    if config is not None:
        cuda.resolve(config.device)
        if "+cpu" in version:
            raise RuntimeError(_without_cuda(version))


@functools.cache
def loaded_version() -> str:
    """Return the version of torchcodec, whose libraries are loaded afterwards."""
    library = importlib.import_module("torchcodec")
    video_decoder = importlib.import_module("torchcodec.decoders").VideoDecoder
    try:
        video_decoder(b"no video")
    except RuntimeError as error:
        # It looks for FFmpeg's libraries when it is imported or, since 0.16, with the first video.
        if "libtorchcodec" in str(error):
            raise
    return str(library.__version__)


def readable(source: Source) -> Source:
    """Return a source that can be read twice: a local path as it is, else its bytes."""
    if isinstance(source, str | os.PathLike) and os.path.isfile(source):
        return os.fspath(source)
    return source if isinstance(source, bytes) else read_source(source)


def frames_at(
    source: Source,
    times: Sequence[int],
    tick: float,
    size: tuple[int, int] | None,
    config: CUDAConfig | None,
    num_threads: int,
) -> Tensor | None:
    """Decode the frames whose display begins at those times; None = torchcodec cannot, or would
    give others.

    source: of ``readable``. times: in ticks. tick: in seconds.
    size: width and height in pixels; None = the video's.
    Returns: uint8, shape (T, H, W, 3), contiguous, on the device of ``config``, ready for the
        current stream; None = on the CPU.
    Raises: RuntimeError, torch.OutOfMemoryError: it is the device that fails.
    """
    seconds = [time * tick for time in times]
    if config is None:
        return decoded_frames(source, seconds, tick, size, "cpu", num_threads)
    device = cuda.resolve(config.device)
    backend: cuda.Backend = cuda.CudaBackend(device, config.stream, use="decode")
    with backend.on_copy_stream():
        # The decoder may write on a stream of its own into memory allocated on this one, without
        # waiting for this stream's earlier work on that memory: let this stream run idle.
        backend.record().synchronize()
        frames = decoded_frames(source, seconds, tick, size, device, num_threads)
        event = backend.record()
    event.synchronize()
    if frames is not None:
        backend.hand_over(event, [frames])
    return frames


def decoded_frames(
    source: Source,
    seconds: Sequence[float],
    tick: float,
    size: tuple[int, int] | None,
    device: torch.device | str,
    num_threads: int,
) -> Tensor | None:
    """Return the frames displayed at these seconds; None = it is not to decode this video."""
    decoder = decoder_of(source, device, num_threads)
    # A container can also mirror frames, which torchcodec neither does nor reports.
    if decoder is None or decoder.metadata.rotation is not None:
        return None
    try:
        # In the middle of a tick no rounding of its times can give the frame before.
        batch = decoder.get_frames_played_at([each + tick / 2 for each in seconds])
    except (RuntimeError, IndexError, ValueError) as error:
        _raise_if_it_is_the_device(error)
        return None
    wanted = torch.tensor(seconds, dtype=torch.float64, device="cpu")
    if (batch.pts_seconds.cpu() - wanted).abs().max() > tick / 2:
        return None  # it counts the frames of some containers in another way
    frames: Tensor = batch.data
    return frames.contiguous() if size is None else resized(frames, size)


def decoder_of(source: Source, device: torch.device | str, num_threads: int) -> Any:
    """Return a decoder, or None for a video that it does not take."""
    video_decoder = importlib.import_module("torchcodec.decoders").VideoDecoder
    options = {"dimension_order": "NHWC", "num_ffmpeg_threads": num_threads}
    try:
        return video_decoder(source, device=str(device), **options)
    except (RuntimeError, ValueError) as error:
        _raise_if_it_is_the_device(error)
        if str(device) != "cpu" and decoder_of(source, "cpu", num_threads) is not None:
            version = importlib.import_module("torchcodec").__version__
            raise RuntimeError(_without_cuda(version)) from error
        return None


def resized(frames: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize all frames in a few kernels, within one level of Pillow: uint8 (T, H, W, 3)."""
    width, height = size
    planes = frames.permute(0, 3, 1, 2)
    if frames.device.type != "cpu":  # the kernel of the GPU takes floats alone
        planes = planes.float()
    planes = interpolate(planes, (height, width), mode="bilinear", antialias=True)
    if planes.is_floating_point():
        planes = planes.round_().clamp_(0, 255).to(torch.uint8)
    return planes.permute(0, 2, 3, 1).contiguous()


def _raise_if_it_is_the_device(error: Exception) -> None:
    """Raise errors that the video did not cause, so that it is not skipped as a bad one."""
    if isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError):
        raise error


def _without_cuda(version: object) -> str:
    return (
        f"decoder='torchcodec': this torchcodec ({version}) cannot decode on a GPU: it was built "
        "without CUDA, or finds no NVDEC. Install it as torch was installed, from the same index; "
        "or leave decoder= out, which decodes on the CPU and copies the frames."
    )


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0]
