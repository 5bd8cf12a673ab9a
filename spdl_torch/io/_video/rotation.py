"""The rotation that puts a frame upright, as its container gives it."""

from __future__ import annotations

import re
import struct
from typing import TYPE_CHECKING, Any

from av.filter import Graph

if TYPE_CHECKING:
    from av.video.frame import VideoFrame


def upright_filters(frame: VideoFrame) -> list[tuple[str, str]]:
    """Return FFmpeg's filters that rotate and mirror the frame; rotations that are not a multiple
    of 90 degrees are left alone."""
    matrix = _display_matrix(frame)
    if matrix is None:
        return []
    a, b, _, c, d = struct.unpack("=9i", matrix)[:5]  # (x, y) -> (ax + cy, bx + dy)
    if not b and not c:
        transposes, mirrors, flips = False, a < 0, d < 0
    elif not a and not d:
        transposes, mirrors, flips = True, c < 0, b < 0
    else:
        return []
    steps = ((transposes, ("transpose", "dir=cclock_flip")), (mirrors, ("hflip", "")))
    return [step for needed, step in (*steps, (flips, ("vflip", ""))) if needed]


def _display_matrix(frame: VideoFrame) -> bytes | None:
    try:
        side_data: Any = frame.side_data  # PyAV's stubs know only a few of its keys
    except ValueError as error:
        # PyAV has no name for one of them, as for the views of spatial video and EXIF.
        kind = re.match(r"(\d+) is not a valid Type", str(error))
        if kind is None:
            raise
        return _display_matrix(_without(frame, kind[1]))
    return bytes(side_data["DISPLAYMATRIX"]) if "DISPLAYMATRIX" in side_data else None


def _without(frame: VideoFrame, kind: str) -> VideoFrame:
    """Return the frame without side data of one kind."""
    graph = Graph()
    source = graph.add(
        "buffer",
        video_size=f"{frame.width}x{frame.height}",
        pix_fmt=frame.format.name,
        time_base="1/1",
        colorspace=str(int(frame.colorspace)),
        range=str(int(frame.color_range)),
    )
    graph.link_nodes(
        source, graph.add("sidedata", f"mode=delete:type={kind}"), graph.add("buffersink")
    ).configure()
    graph.push(frame)
    return graph.pull()  # type: ignore[return-value]  # a sink of video
