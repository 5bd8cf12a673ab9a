"""Read the packets of a video or an image, and load a whole video or a window of it in one call."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, SupportsFloat

from .._config import RGB24
from .._source import read_source, source_name
from .._transfer.transfer import check_device_config, to_device
from .frames import convert_frames, decode_packets
from .opening import MediaFile
from .packets import ImagePackets, VideoPackets
from .reading import UnsureError, Video, no_frame

if TYPE_CHECKING:
    from torch import Tensor

    from .._config import DecodeConfig, DemuxConfig
    from .._source import Source
    from .._transfer.transfer import CUDAConfig


def demux_video(
    src: Source,
    *,
    timestamp: tuple[SupportsFloat | str, SupportsFloat | str] | None = None,
    demux_config: DemuxConfig | None = None,
    bsf: str | None = None,
    name: str | None = None,
) -> VideoPackets:
    """Read the encoded packets of a video, without decoding.

    Args:
        src: a path, a URL that fsspec opens, the file's bytes (bytes or uint8 tensor of one
            dimension) or a binary file.
        timestamp: start and end in seconds. Reads only what decoding the frames of
            ``start <= time < end`` needs: from the keyframe before them on, or, where the container
            lists no packets, from the first packet on. None reads everything.
        demux_config: options for opening the container, from :func:`demux_config`.
        bsf: FFmpeg's description of bitstream filters to apply to the packets.
        name: the source's name in errors; by default its path, or ``<bytes>``.

    Returns: packets from which :func:`decode_packets` decodes exactly those frames.
    Raises:
        DecodeError: not a video, damaged, or no frame in the window.
        OSError: a path cannot be read.
        ValueError: FFmpeg has no such format, or refuses ``bsf``.
    """
    window = None if timestamp is None else window_of(timestamp)
    packets = _read(MediaFile(src, demux_config, name), window, bsf)
    if packets.is_fast and not len(packets):
        raise no_frame(packets.source, window)
    return packets


def _read(
    file: MediaFile, window: tuple[float, float] | None, bsf: str | None, *, is_fast: bool = True
) -> VideoPackets:
    """Read the fast way; where that is closed, from the first packet on."""
    again = partial(_read, file, window, bsf, is_fast=False)
    try:
        with file.open() as opened:
            video = Video(*opened, file.name, is_fast=is_fast)
            return VideoPackets(video, [window or (-math.inf, math.inf)], window, bsf, again)
    except UnsureError:
        return again()


def demux_image(
    src: Source,
    *,
    demux_config: DemuxConfig | None = None,
    bsf: str | None = None,
    name: str | None = None,
) -> ImagePackets:
    """Read an image, without decoding it, for :func:`decode_packets` and FFmpeg's filters.

    :func:`decode_image` and :func:`load_image_batch` need no FFmpeg and take half the time.

    Args:
        src: as in :func:`decode_image`. Of an animation the first picture is read.
        demux_config, bsf, name: as in :func:`demux_video`.

    Raises:
        DecodeError: not an image that FFmpeg knows.
        OSError: a path cannot be read.
        ValueError: FFmpeg has no such format, or refuses ``bsf``.
    """
    # From memory: of a path FFmpeg would take "%03d" for a number, and "*" for any name.
    file = MediaFile(read_source(src), demux_config, name or source_name(src))
    with file.open() as opened:
        video = Video(*opened, file.name, is_fast=False)
        video.keep_first()
        return ImagePackets(video, bsf)


def window_of(timestamp: tuple[SupportsFloat | str, SupportsFloat | str]) -> tuple[float, float]:
    """Return start and end in seconds. Raises: ValueError: they are no window."""
    # A string may be a fraction, as in SPDL.
    start, end = (float(Fraction(t) if isinstance(t, str) else t) for t in timestamp)
    if not start < end:
        raise ValueError(f"timestamp must be (start, end) with start < end, got {timestamp}.")
    return start, end


def load_video(
    src: Source,
    timestamp: tuple[SupportsFloat | str, SupportsFloat | str] | None = None,
    *,
    demux_config: DemuxConfig | None = None,
    decode_config: DecodeConfig | None = None,
    filter_desc: str | None = RGB24,
    device_config: CUDAConfig | None = None,
    name: str | None = None,
    num_threads: int = 1,
) -> Tensor:
    """Load the frames of a video.

    Args:
        src, timestamp, demux_config, name: as in :func:`demux_video`.
        filter_desc, decode_config, num_threads: as in :func:`decode_packets`.
        device_config: from :func:`cuda_config`: the device for the tensor.

    Returns: as :func:`convert_frames`: uint8 (N, H, W, 3) unless ``filter_desc`` says otherwise.
    Raises: as those three, and as :func:`transfer_tensor`.
    """
    if device_config is not None:
        check_device_config(device_config, "load_video")
    packets = demux_video(src, timestamp=timestamp, demux_config=demux_config, name=name)
    batch = convert_frames(
        decode_packets(packets, filter_desc, decode_config, num_threads=num_threads)
    )
    return batch if device_config is None else to_device(batch, device_config)
