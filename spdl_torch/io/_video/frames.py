"""Decoded frames of a video, and arrays made from them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import closing
from fractions import Fraction
from typing import TYPE_CHECKING, Any, SupportsFloat

import numpy as np
import torch
from torch import Tensor

from spdl_torch.errors import DecodeError, UnsupportedOptionError

from .._options import RGB24, DecodeConfig
from .._storage import Storage, room_for
from .._transfer.transfer import CUDAConfig, check_device_config, to_device
from .decode import decode_wanted
from .filters import FilterChain
from .packets import ImagePackets, VideoPackets, demux_video
from .reading import UnsureError, no_frame

if TYPE_CHECKING:
    from av.video.frame import VideoFrame
    from numpy.typing import NDArray

    from .._source import Source

_CHANNELS = {
    **dict.fromkeys(("rgb24", "bgr24"), 3),
    **dict.fromkeys(("rgba", "bgra", "argb", "abgr"), 4),
    "gray": 1,
}
"""Packed formats of 8 bits."""

_PLANES = {
    **dict.fromkeys(("yuv444p", "yuvj444p"), "444"),
    **dict.fromkeys(("yuv420p", "yuvj420p", "nv12", "nv21"), "420"),
    **dict.fromkeys(("yuv422p", "yuvj422p"), "422"),
}
"""Planar formats of 8 bits."""


class VideoFrames:
    """Decoded frames, in the order of display."""

    def __init__(self, source: str, frames: list[VideoFrame]) -> None:
        self.source = source
        """The file's name in errors."""
        self.frames = frames
        """PyAV's frames, at least one."""
        self.num_frames, first = len(frames), frames[0]
        self.width, self.height = first.width, first.height
        """The size in pixels, after filtering."""
        self.pix_fmt = first.format.name
        """FFmpeg's name of the pixel format."""

    @property
    def time_base(self) -> tuple[int, int]:
        """The seconds of one tick, as numerator and denominator."""
        # From version 19 on PyAV's own rational number, zero where there is none.
        time_base: Any = self.frames[0].time_base
        return Fraction(time_base or 1).as_integer_ratio()

    def get_pts(self) -> list[int]:
        """Return the display time of each frame, in ticks."""
        return [frame.pts for frame in self.frames if frame.pts is not None]

    def get_timestamps(self) -> list[float]:
        """Return the display time of each frame, in seconds."""
        time_base = Fraction(*self.time_base)
        return [float(pts * time_base) for pts in self.get_pts()]

    def __len__(self) -> int:
        return len(self.frames)

    def __getitem__(self, place: int) -> ImageFrames:
        return ImageFrames(self.source, [self.frames[place]])


class ImageFrames(VideoFrames):
    """One decoded frame."""

    @property
    def pts(self) -> float | None:
        """The display time in seconds; None if unknown."""
        return next(iter(self.get_timestamps()), None)


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
            with closing(decode_wanted(packets, indices, num_threads)) as decoded:
                return list(itertools.islice(chain.run(decoded), most))
        except UnsureError:
            packets.fall_back()


def convert_frames(
    frames: VideoFrames | Sequence[VideoFrames], storage: Storage | None = None
) -> Tensor:
    """Copy decoded frames into one tensor.

    storage: memory for the tensor, from :func:`cpu_storage`, where the next call overwrites it,
            or :func:`batch_storage`.

    Returns: uint8, CPU, contiguous; N is the number of frames.

        | pixel format | shape |
        |---|---|
        | rgb24, bgr24 | (N, H, W, 3) |
        | rgba, bgra, argb, abgr | (N, H, W, 4) |
        | gray | (N, H, W, 1) |
        | yuv444p | (N, 3, H, W) |
        | yuv420p, nv12 | (N, 1, H * 3/2, W): the planes one after the other |
        | yuv422p | (N, 1, H * 2, W): likewise |

        A list of :class:`VideoFrames` adds a leading dimension; for a list of
        :class:`ImageFrames`, N is its length.
    Raises:
        DecodeError: the frames differ in size or format, or the videos in their number of frames.
        UnsupportedOptionError: another format, or a size whose planes do not fill an array.
        ValueError: ``storage`` is too small.
    """
    groups = [frames] if isinstance(frames, VideoFrames) else list(frames)
    if not groups:
        raise ValueError("frames must hold at least one, got none.")
    counts = {len(group) for group in groups}
    if len(counts) > 1:
        raise DecodeError(
            f"{groups[0].source}: {len(groups)} videos of {sorted(counts)} frames make no batch. "
            "Take windows, or filters, that leave as many."
        )
    first = groups[0].frames[0]
    size = _shape(first.format.name, first.height, first.width)
    batch = room_for((sum(map(len, groups)), *size), storage)
    rows = iter(batch)
    for group in groups:
        for frame in group.frames:
            _copy_frame(frame, first, next(rows), group.source)
    if isinstance(frames, VideoFrames):
        return batch[0] if isinstance(frames, ImageFrames) else batch
    if all(isinstance(group, ImageFrames) for group in groups):
        return batch
    return batch.view(len(groups), len(groups[0]), *size)


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


def to_torch(buffer: Any) -> Tensor:
    """Return an array as a tensor, without a copy where possible.

    Args:
        buffer: a tensor, a NumPy array, or an object with DLPack or the array interface.

    Returns: a tensor on the same memory; a copy where that is read-only or has negative strides,
        which tensors do not support.
    """
    if isinstance(buffer, Tensor):
        return buffer
    if not isinstance(buffer, np.ndarray) and hasattr(buffer, "__dlpack__"):
        return torch.utils.dlpack.from_dlpack(buffer)
    array = np.asarray(buffer)
    if not array.flags.writeable or any(stride < 0 for stride in array.strides):
        array = array.copy()
    return torch.from_numpy(array)


def to_numpy(buffer: Any) -> NDArray[Any]:
    """Return an array as a NumPy array on the same memory.

    Args:
        buffer: a tensor on the CPU, a NumPy array, or an object with the array interface.

    Raises: TypeError: a tensor on another device, or an object without an array.
    """
    if isinstance(buffer, Tensor):
        return buffer.detach().numpy()
    if not isinstance(buffer, np.ndarray) and not hasattr(buffer, "__array_interface__"):
        raise TypeError(
            f"to_numpy: expected a tensor or what has __array_interface__, got "
            f"{type(buffer).__name__}."
        )
    return np.asarray(buffer)


def _shape(pix_fmt: str, height: int, width: int) -> tuple[int, ...]:
    if pix_fmt in _CHANNELS:
        return height, width, _CHANNELS[pix_fmt]
    layout = _PLANES.get(pix_fmt)
    if layout == "444":
        return 3, height, width
    if layout is not None and width % 2 == 0 and (height % 2 == 0 or layout == "422"):
        return 1, height * 2 if layout == "422" else height * 3 // 2, width
    known = ", ".join((*_CHANNELS, *_PLANES))
    raise UnsupportedOptionError(
        f"frames of {pix_fmt} and {width}x{height} do not fill an array. Use one of {known} "
        f"(yuv420p, nv12 with even sizes, yuv422p with even widths)."
    )


def _copy_frame(frame: VideoFrame, first: VideoFrame, out: Tensor, source: str) -> None:
    """Copy the planes of a frame, one after the other, without the padding of their lines.

    Raises: DecodeError: the frame differs from the batch's ``first`` in size or format.
    """
    kind, given = (f"{each.format.name} {each.width}x{each.height}" for each in (first, frame))
    if given != kind:
        raise DecodeError(
            f"{source}: the frames change from {kind} to {given}. Scale them to one size."
        )
    flat = out.view(-1)
    done = 0
    for number, plane in enumerate(frame.planes):
        lines = torch.frombuffer(plane, dtype=torch.uint8).view(-1, plane.line_size)
        num_bytes = plane.width * _CHANNELS.get(frame.format.name, 1)
        if number and frame.format.name in ("nv12", "nv21"):
            num_bytes *= 2  # both colours
        end = done + lines.shape[0] * num_bytes
        flat[done:end].view(-1, num_bytes).copy_(lines[:, :num_bytes])
        done = end


def rgb_view(frame: VideoFrame) -> Tensor:
    """Return a view of an rgb24 frame: uint8, shape (H, W, 3), CPU, with gaps between the rows.

    The memory is freed with the frame.
    """
    plane = frame.planes[0]
    flat = torch.frombuffer(plane, dtype=torch.uint8)
    return flat.as_strided((frame.height, frame.width, 3), (plane.line_size, 3, 1))
