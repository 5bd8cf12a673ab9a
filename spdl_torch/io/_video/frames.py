"""Decoded frames of a video, and tensors made from them."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import torch

from spdl_torch.errors import DecodeError, UnsupportedOptionError

from .._storage import Storage, room_for

if TYPE_CHECKING:
    from av.video.frame import VideoFrame
    from torch import Tensor

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
