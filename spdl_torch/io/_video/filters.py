"""FFmpeg's filters: descriptions written from options, and chains that run on frames."""

from __future__ import annotations

import contextlib
import shlex
import struct
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from av.error import BlockingIOError as NoFrameYet, EOFError as NoFrameLeft, FFmpegError
from av.filter import Graph
from av.video.format import VideoFormat
from av.video.reformatter import VideoReformatter

from spdl_torch.errors import UnsupportedOptionError

from .opening import decode_errors

if TYPE_CHECKING:
    from av.video.frame import VideoFrame

    from .packets import VideoPackets

_IN_ORDER = ("copy", "")
"""A filter after which lines run forwards, as those of a tensor do; in an AVI, raw ones may not."""


_TURNS = {
    90: [("transpose", "dir=cclock")],
    -90: [("transpose", "dir=clock")],
    180: [("hflip", ""), ("vflip", "")],
    -180: [("hflip", ""), ("vflip", "")],
}
"""Filters that put a frame upright, by the rotation that FFmpeg reads from its matrix."""


def get_filter_desc(packets: VideoPackets, **options: Any) -> str | None:
    """Return the filter description for these packets.

    Args:
        packets: from :func:`demux_video`. Their window needs no filter: decoding keeps to it.
        options: as in :func:`get_video_filter_desc`.
    """
    del packets  # SPDL tells audio from video by them
    return get_video_filter_desc(**options)


def get_video_filter_desc(
    *,
    scale_width: int | None = None,
    scale_height: int | None = None,
    scale_algo: str = "bicubic",
    pix_fmt: str | None = "rgb24",
    filter_desc: str | None = None,
) -> str | None:
    """Return a filter description in FFmpeg's language, for :func:`decode_packets`.

    Args:
        scale_width, scale_height: resize, and fill up another shape with black borders; 0 (or None,
            if the other is given) keeps the size.
        scale_algo: one of FFmpeg's flags for scaling, such as "bilinear" or "area".
        pix_fmt: FFmpeg's name of the pixel format; None keeps what the video has.
        filter_desc: more filters, before the pixel format.

    Returns: the description, or None if nothing is asked for.
    """
    filters = []
    if scale_width is not None or scale_height is not None:
        size = f"w={scale_width or 0}:h={scale_height or 0}"
        fit = f"flags={scale_algo}:force_original_aspect_ratio=decrease"
        filters = [f"scale={size}:{fit}", f"pad={size}:x=-1:y=-1:color=black"]
    if filter_desc is not None:
        filters.append(filter_desc)
    if pix_fmt is not None:
        filters.append(f"format=pix_fmts={pix_fmt}")
    return ",".join(filters) or None


def parse_filters(description: str) -> list[tuple[str, str]]:
    """Return the names and arguments of a chain of filters, unquoted once as FFmpeg does.

    Raises: UnsupportedOptionError: a graph with branches; ValueError: no chain at all.
    """
    lexer = shlex.shlex(description, posix=True, punctuation_chars="[];")
    lexer.whitespace, lexer.whitespace_split = ",", True
    lexer.quotes, lexer.commenters = "'", ""
    try:
        filters = [text.strip().partition("=") for text in lexer]
    except ValueError as error:
        raise ValueError(f"filter_desc {description!r}: {error}.") from error
    for name, _, _ in filters:
        if name and not name.strip("[];"):
            raise UnsupportedOptionError(
                f"filter_desc {description!r}: only a chain of filters can be run, not a graph "
                f"with labels or branches. Leave out {name!r}, or quote it."
            )
    if not all(name for name, _, _ in filters or [("", "", "")]):
        raise ValueError(f"filter_desc {description!r}: a filter without a name.")
    return [(name, arguments) for name, _, arguments in filters]


class FilterChain:
    """Puts frames upright and through a chain of filters.

    Raises: ValueError: FFmpeg does not know the filters or refuses their arguments; DecodeError: it
        refuses a frame.
    """

    def __init__(
        self,
        description: str | None,
        name: str,
        frame_rate: tuple[int, int],
        num_threads: int,
        *,
        is_stored: bool = False,
    ) -> None:
        """Take the description.

        Args:
            name: of the source, in errors.
            frame_rate: as numerator and denominator; (0, 1) if unknown.
            is_stored: leave frames as they are stored, not upright.
        """
        self._chain = [] if description is None else parse_filters(description)
        self._format = _plain_format(self._chain)
        self._name, self._frame_rate, self._num_threads = name, frame_rate, num_threads
        self._is_stored = is_stored
        self._reformatter = VideoReformatter()
        self._key: tuple[object, ...] | None = None
        self._running: Graph | None = None

    def run(self, frames: Iterable[VideoFrame]) -> Iterator[VideoFrame]:
        """Yield what comes out of the chain."""
        for frame in frames:
            yield from self.push(frame)
        yield from self.finish()

    def push(self, frame: VideoFrame) -> list[VideoFrame]:
        """Return what comes out after one more frame."""
        upright = [] if self._is_stored else _upright(frame)
        if frame.planes[0].line_size < 0:
            upright = [_IN_ORDER, *upright]
        if not upright and not self._chain:
            return [frame]
        with decode_errors(self._name):
            if not upright and self._format is not None:
                options: Any = {"format": self._format, "threads": self._num_threads}
                return [self._reformatter.reformat(frame, **options)]
            key = (frame.width, frame.height, frame.format.name, tuple(upright))
            before = [] if key == self._key else self.finish()  # the size changes within the video
            if self._running is None:
                self._key, self._running = key, self._configured(frame, [*upright, *self._chain])
            return [*before, *_pushed(self._running, frame)]

    def finish(self) -> list[VideoFrame]:
        """Return the frames that are still inside."""
        if self._running is None:
            return []
        with decode_errors(self._name):
            frames = _pushed(self._running, None)
        self._running = None
        return frames

    def _configured(self, frame: VideoFrame, chain: list[tuple[str, str]]) -> Graph:
        text = ",".join(name + (f"={arguments}" if arguments else "") for name, arguments in chain)
        if any(name.partition("@")[0] == "vflip" for name, _ in chain):
            chain = [*chain, _IN_ORDER]  # it flips no pixels but lets the lines run backwards
        graph = Graph()
        graph.threads = self._num_threads
        options = {
            "video_size": f"{frame.width}x{frame.height}",
            "pix_fmt": frame.format.name,
            "time_base": str(frame.time_base or "1/1"),
            "colorspace": str(int(frame.colorspace)),
            "range": str(int(frame.color_range)),
        }
        if self._frame_rate[0] > 0:
            options["frame_rate"] = "{}/{}".format(*self._frame_rate)
        try:
            nodes = [graph.add("buffer", **options)]
            nodes += [graph.add(name, arguments or None) for name, arguments in chain]
            nodes.append(graph.add("buffersink"))
            graph.link_nodes(*nodes).configure()
        except (FFmpegError, ValueError) as error:
            raise ValueError(f"filter_desc: FFmpeg refuses {text!r}: {error}.") from error
        return graph


def _upright(frame: VideoFrame) -> list[tuple[str, str]]:
    """Return FFmpeg's filters that rotate and mirror the frame, as its container gives it; a
    rotation that is not a multiple of 90 degrees is left alone."""
    turn = _TURNS.get(frame.rotation, [])
    try:
        side_data: Any = frame.side_data  # PyAV's stubs know only a few of its keys
    except ValueError:  # nor has it a name for some, as of spatial video; mirrors are rare
        return turn
    if "DISPLAYMATRIX" not in side_data:
        return turn
    a, b, _, c, d = struct.unpack("=9i", bytes(side_data["DISPLAYMATRIX"]))[:5]
    # FFmpeg's rotation is that of the first row. A mirror turns the second one round.
    return [("vflip", ""), *turn] if a * d < b * c else turn


def _pushed(graph: Graph, frame: VideoFrame | None) -> list[VideoFrame]:
    """Return what comes out after one more frame, or, after the last one, what is inside."""
    frames = []
    with contextlib.suppress(NoFrameLeft):  # the filters have all they want
        graph.vpush(frame)
    with contextlib.suppress(NoFrameYet, NoFrameLeft):
        while True:
            frames.append(graph.vpull())
    return frames


def _plain_format(chain: list[tuple[str, str]]) -> str | None:
    """Return the format, where the chain is nothing but the change of it."""
    if len(chain) != 1 or chain[0][0] != "format":
        return None
    pix_fmt = chain[0][1].removeprefix("pix_fmts=")
    try:
        return VideoFormat(pix_fmt).name
    except ValueError:
        return None  # a list of formats, or none that exists
