"""Read, decode and load videos and images by FFmpeg, as a whole or in steps."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING, SupportsFloat

from spdl_torch.errors import DecodeError

from .._options import RGB24, DecodeConfig, window_of
from .._source import read_source, source_name
from .._transfer.transfer import CUDAConfig, check_device_config, to_device
from .filters import FilterChain
from .frames import ImageFrames, VideoFrames, convert_frames
from .opening import MediaFile
from .packets import ImagePackets, VideoPackets
from .reading import UnsureError, no_frame

if TYPE_CHECKING:
    from av.video.frame import VideoFrame
    from torch import Tensor

    from .._source import Source


def demux_video(
    src: Source,
    *,
    timestamp: tuple[SupportsFloat | str, SupportsFloat | str] | None = None,
    name: str | None = None,
) -> VideoPackets:
    """Read the encoded packets of a video, without decoding.

    Args:
        src: a path, a URL that fsspec opens, the file's bytes (bytes or uint8 tensor of one
            dimension) or a binary file.
        timestamp: start and end in seconds. Reads only what decoding the frames of
            ``start <= time < end`` needs: from the keyframe before them on, or, where the container
            lists no packets, from the first packet on. None reads everything.
        name: the source's name in errors; by default its path, or ``<bytes>``.

    Returns: packets from which :func:`decode_packets` decodes exactly those frames.
    Raises:
        DecodeError: not a video, damaged, or no frame in the window.
        OSError: a path cannot be read.
    """
    window = None if timestamp is None else window_of(timestamp)
    packets = VideoPackets.read(MediaFile(src, name), window)
    if packets.is_fast and not len(packets):
        raise no_frame(packets.source, window)
    return packets


def demux_image(src: Source, *, name: str | None = None) -> ImagePackets:
    """Read an image, without decoding it, for :func:`decode_packets` and FFmpeg's filters.

    :func:`decode_image` and :func:`load_image_batch` need no FFmpeg and take half the time.

    Args:
        src: as in :func:`decode_image`. Of an animation the first picture is read.
        name: as in :func:`demux_video`.

    Raises:
        DecodeError: not an image that FFmpeg knows.
        OSError: a path cannot be read.
    """
    # From memory: of a path FFmpeg would take "%03d" for a number, and "*" for any name.
    return ImagePackets.read(MediaFile(read_source(src), name or source_name(src)))


def decode_packets(
    packets: VideoPackets,
    filter_desc: str | None = RGB24,
    decode_config: DecodeConfig | None = None,
    *,
    num_frames: int = -1,
    num_threads: int = 1,
) -> VideoFrames:
    """Decode the frames of the packets' window, or an image.

    Frames of a video that the container rotates are put upright before the filters.

    Args:
        packets: from :func:`demux_video` or :func:`demux_image`; they can be decoded again.
        filter_desc: FFmpeg's description of a chain of filters, as from :func:`get_filter_desc`;
            "format=pix_fmts=rgb24" by default. None filters nothing.
        decode_config: the number of threads, from :func:`decode_config`, in place of
            ``num_threads``.
        num_frames: the most frames to return; -1 returns all.
        num_threads: the threads of FFmpeg's filters and decoder; those of the decoder are set when
            the packets are decoded first.

    Returns: frames in the order of display, at least one; for an image an :class:`ImageFrames`.
    Raises:
        DecodeError: damaged data, or no frame in it.
        ValueError: FFmpeg refuses the filters.
    """
    frames = _decode(packets, None, filter_desc, decode_config, num_frames, num_threads)
    if not frames:
        raise no_frame(packets.source, packets.timestamp)
    kind = ImageFrames if isinstance(packets, ImagePackets) else VideoFrames
    return kind(packets.source, frames)


def sample_decode_video(
    packets: VideoPackets,
    indices: Sequence[int],
    *,
    decode_config: DecodeConfig | None = None,
    filter_desc: str | None = RGB24,
) -> list[ImageFrames]:
    """Decode chosen frames of a video, starting at the keyframes that they need.

    Args:
        packets: from :func:`demux_video`.
        indices: indices in the order of display, ascending, each once.
        decode_config: as in :func:`decode_packets`.
        filter_desc: as there; must output one frame for each input frame.

    Returns: one frame for each index.
    Raises:
        DecodeError: damaged data.
        IndexError: an index outside ``range(len(packets))``.
        ValueError: no indices, or not ascending.
    """
    if not len(indices):
        raise ValueError("indices must not be empty.")
    if any(not a < b for a, b in itertools.pairwise(indices)):
        raise ValueError(f"indices must be ascending, each once, got {list(indices)}.")
    frames = _decode(packets, indices, filter_desc, decode_config)
    if len(frames) != len(indices):
        raise DecodeError(
            f"{packets.source}: {len(frames)} frames came out for {len(indices)} indices; it is "
            f"damaged, or filter_desc {filter_desc!r} changes the number of frames."
        )
    return [ImageFrames(packets.source, [frame]) for frame in frames]


def _decode(
    packets: VideoPackets,
    indices: Sequence[int] | None,
    filter_desc: str | None,
    config: DecodeConfig | None,
    num_frames: int = -1,
    num_threads: int = 1,
) -> list[VideoFrame]:
    """Decode the frames at some indices, or all: from the first packet on where the check fails."""
    most = num_frames if num_frames >= 0 else None
    if config is not None:
        num_threads = config.num_threads
    is_stored = isinstance(packets, ImagePackets)
    options = filter_desc, packets.source, packets.frame_rate, num_threads
    while True:
        chain = FilterChain(*options, is_stored=is_stored)
        try:
            with closing(packets.frames(indices, num_threads)) as decoded:
                return list(itertools.islice(chain.run(decoded), most))
        except UnsureError:
            packets.fall_back()


def load_video(
    src: Source,
    timestamp: tuple[SupportsFloat | str, SupportsFloat | str] | None = None,
    *,
    decode_config: DecodeConfig | None = None,
    filter_desc: str | None = RGB24,
    device_config: CUDAConfig | None = None,
    name: str | None = None,
    num_threads: int = 1,
) -> Tensor:
    """Load the frames of a video.

    Args:
        src, timestamp, name: as in :func:`demux_video`.
        filter_desc, decode_config, num_threads: as in :func:`decode_packets`.
        device_config: from :func:`cuda_config`: the device for the tensor.

    Returns: as :func:`convert_frames`: uint8 (N, H, W, 3) unless ``filter_desc`` says otherwise.
    Raises: as those three, and as :func:`transfer_tensor`.
    """
    if device_config is not None:
        check_device_config(device_config, "load_video")
    packets = demux_video(src, timestamp=timestamp, name=name)
    frames = decode_packets(packets, filter_desc, decode_config, num_threads=num_threads)
    batch = convert_frames(frames)
    return batch if device_config is None else to_device(batch, device_config)
