"""The rotation that puts a frame upright, as its container gives it."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from av.video.frame import VideoFrame

__all__ = ["upright_filters"]


def upright_filters(frame: VideoFrame) -> list[tuple[str, str]]:
    """Return FFmpeg's filters that rotate and mirror the frame; rotations that are not a multiple
    of 90 degrees are left alone."""
    side_data: Any = frame.side_data  # PyAV's stubs know only a few of its keys
    try:
        matrix = side_data["DISPLAYMATRIX"]
    except KeyError:
        return []
    a, b, _, c, d = struct.unpack("=9i", bytes(matrix))[:5]  # (x, y) -> (ax + cy, bx + dy)
    if not b and not c:
        transposes, mirrors, flips = False, a < 0, d < 0
    elif not a and not d:
        transposes, mirrors, flips = True, c < 0, b < 0
    else:
        return []
    steps = ((transposes, ("transpose", "dir=cclock_flip")), (mirrors, ("hflip", "")))
    return [step for needed, step in (*steps, (flips, ("vflip", ""))) if needed]
