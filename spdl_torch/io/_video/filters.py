"""FFmpeg's filter descriptions: written from options, and run on frames."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Literal

from av.error import BlockingIOError as NoFrameYet, EOFError as NoFrameLeft, FFmpegError
from av.filter import Graph
from av.video.format import VideoFormat
from av.video.reformatter import VideoReformatter

from spdl_torch.errors import UnsupportedOptionError

from .opening import decode_errors
from .rotation import upright_filters

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from av.filter.context import FilterContext
    from av.video.frame import VideoFrame

    from .packets import VideoPackets

_IN_ORDER = ("copy", "")
"""A filter after which lines run forwards, as those of a tensor do; in an AVI, raw ones may not."""

ScaleMode = Literal["pad", "crop"] | None


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
    frame_rate: tuple[int, int] | None = None,
    timestamp: tuple[float, float] | None = None,
    scale_width: int | None = None,
    scale_height: int | None = None,
    scale_algo: str = "bicubic",
    scale_mode: ScaleMode = "pad",
    crop_width: int | None = None,
    crop_height: int | None = None,
    pix_fmt: str | None = "rgb24",
    num_frames: int | None = None,
    pad_mode: str | None = None,
    filter_desc: str | None = None,
) -> str | None:
    """Return a filter description in FFmpeg's language, for :func:`decode_packets`.

    Args:
        frame_rate: frames a second, as numerator and denominator; frames are dropped or repeated.
        timestamp: keep the frames of ``start <= time < end``, in seconds.
        scale_width, scale_height: resize; 0 (or None, if the other is given) keeps the size, -n
            keeps the shape with a size that can be divided by n.
        scale_algo: one of FFmpeg's flags for scaling, such as "bilinear" or "area".
        scale_mode: for another shape: "pad" adds black borders, "crop" cuts off what is too much,
            None distorts.
        crop_width, crop_height: cut that out of the middle, after scaling.
        pix_fmt: FFmpeg's name of the pixel format; None keeps what the video has.
        num_frames: cut after this many, or add frames up to this number.
        pad_mode: colour of the frames added; None repeats the last.
        filter_desc: more filters, before the pixel format.

    Returns: the description, or None if nothing is asked for.
    """
    if scale_mode not in ("pad", "crop", None):
        raise ValueError(f"scale_mode must be 'pad', 'crop' or None, got {scale_mode!r}.")
    filters = []
    if frame_rate is not None:
        filters.append("fps={}/{}".format(*frame_rate))
    if timestamp is not None:
        filters.append("trim=start={}:end={}".format(*timestamp))
    if scale_width is not None or scale_height is not None:
        filters += _scale(scale_width or 0, scale_height or 0, scale_algo, scale_mode)
    if crop_width is not None or crop_height is not None:
        sizes = {"w": crop_width, "h": crop_height}
        given = [f"{key}={value}" for key, value in sizes.items() if value is not None]
        filters.append("crop=" + ":".join(given))
    if num_frames is not None:
        added = "stop_mode=clone" if pad_mode is None else f"stop_mode=add:color={pad_mode}"
        filters += [f"tpad=stop=-1:{added}", f"trim=end_frame={num_frames}"]
    if filter_desc is not None:
        filters.append(filter_desc)
    if pix_fmt is not None:
        filters.append(f"format=pix_fmts={pix_fmt}")
    return ",".join(filters) or None


def _scale(width: int, height: int, algorithm: str, mode: ScaleMode) -> list[str]:
    size = f"w={width}:h={height}"
    scale = f"scale={size}" + (f":flags={algorithm}" if algorithm else "")
    if mode == "pad":
        keep = ":force_original_aspect_ratio=decrease"
        return [scale + keep, f"pad={size}:x=-1:y=-1:color=black"]
    if mode == "crop":
        return [scale + ":force_original_aspect_ratio=increase", f"crop={size}"]
    return [scale]


def parse_filters(description: str) -> list[tuple[str, str]]:
    """Return the names and arguments of a chain of filters, unquoted once as FFmpeg does.

    Raises: UnsupportedOptionError: a graph with branches; ValueError: no chain at all.
    """
    filters: list[tuple[str, str]] = []
    for text in _split(description):
        name, _, arguments = text.partition("=")
        if not name:
            raise ValueError(f"filter_desc {description!r}: a filter without a name.")
        filters.append((name, arguments))
    return filters


def _split(description: str) -> Iterator[str]:
    """Split at commas; a backslash or single quotes keep what follows or is between."""
    text, spaces = "", ""
    characters = iter(description)
    for character in characters:
        if character == "\\":
            text, spaces = text + spaces + next(characters, ""), ""
        elif character == "'":
            text, spaces = text + spaces, ""
            while (quoted := next(characters, "'")) != "'":
                text += quoted
        elif character == ",":
            yield text
            text, spaces = "", ""
        elif character in "[];":
            raise UnsupportedOptionError(
                f"filter_desc {description!r}: only a chain of filters can be run, not a graph "
                f"with labels or branches. Leave out {character!r}, or quote it."
            )
        elif character.isspace():
            spaces += character if text else ""
        else:
            text, spaces = text + spaces + character, ""
    yield text


def filter_frames(
    frames: Iterable[VideoFrame],
    description: str | None,
    packets: VideoPackets,
    num_threads: int = 1,
) -> Iterator[VideoFrame]:
    """Put frames of these packets upright and through a chain of filters.

    Raises: ValueError: FFmpeg does not know the filters or refuses their arguments; DecodeError: it
        refuses a frame.
    """
    chain = [] if description is None else parse_filters(description)
    with decode_errors(packets.source):
        yield from _filtered(frames, chain, packets, num_threads)


def _filtered(
    frames: Iterable[VideoFrame],
    chain: list[tuple[str, str]],
    packets: VideoPackets,
    num_threads: int,
) -> Iterator[VideoFrame]:
    reformatter = VideoReformatter()
    pix_fmt = _plain_format(chain)
    graph: _RunningGraph | None = None
    for frame in frames:
        known = packets.decoder.upright
        upright = upright_filters(frame) if known is None else known
        if frame.planes[0].line_size < 0:
            upright = [_IN_ORDER, *upright]
        if not upright and not chain:
            yield frame
        elif not upright and pix_fmt is not None:
            yield reformatter.reformat(frame, format=pix_fmt, threads=num_threads)
        else:
            key = (frame.width, frame.height, frame.format.name, tuple(upright))
            if graph is None or graph.key != key:
                if graph is not None:  # the picture's size changes within the video
                    yield from graph.finish()
                graph = _RunningGraph(key, frame, [*upright, *chain], packets, num_threads)
            yield from graph.run(frame)
    if graph is not None:
        yield from graph.finish()


def _plain_format(chain: list[tuple[str, str]]) -> str | None:
    """Return the format, where the chain is nothing but the change of it."""
    if len(chain) != 1 or chain[0][0] != "format":
        return None
    pix_fmt = chain[0][1].removeprefix("pix_fmts=")
    try:
        return VideoFormat(pix_fmt).name
    except ValueError:
        return None  # a list of formats, or none that exists


class _RunningGraph:
    """A configured graph of filters, for frames of one size and format."""

    def __init__(
        self,
        key: tuple[object, ...],
        frame: VideoFrame,
        chain: list[tuple[str, str]],
        packets: VideoPackets,
        num_threads: int,
    ) -> None:
        self.key = key
        self._graph = Graph()
        self._graph.threads = num_threads
        text = ",".join(name + (f"={arguments}" if arguments else "") for name, arguments in chain)
        if any(name.partition("@")[0] == "vflip" for name, _ in chain):
            chain = [*chain, _IN_ORDER]  # it flips no pixels but lets the lines run backwards
        try:
            nodes = [self._source(frame, packets.frame_rate)]
            nodes += [self._graph.add(name, arguments or None) for name, arguments in chain]
            self._sink = self._graph.add("buffersink")
            self._graph.link_nodes(*nodes, self._sink).configure()
        except (FFmpegError, ValueError) as error:
            raise ValueError(f"filter_desc: FFmpeg refuses {text!r}: {error}.") from error
        self._input = nodes[0]

    def run(self, frame: VideoFrame) -> Iterator[VideoFrame]:
        """Return the output after one more frame."""
        with contextlib.suppress(NoFrameLeft):  # the filters have all they want
            self._input.push(frame)
        return self._pull()

    def finish(self) -> Iterator[VideoFrame]:
        """Return the frames that are still inside."""
        with contextlib.suppress(NoFrameLeft):
            self._input.push(None)
        return self._pull()

    def _source(self, frame: VideoFrame, frame_rate: tuple[int, int]) -> FilterContext:
        arguments = {
            "video_size": f"{frame.width}x{frame.height}",
            "pix_fmt": frame.format.name,
            "time_base": str(frame.time_base),
            "colorspace": str(int(frame.colorspace)),
            "range": str(int(frame.color_range)),
        }
        if frame_rate[0] > 0:
            arguments["frame_rate"] = "{}/{}".format(*frame_rate)
        return self._graph.add("buffer", **arguments)

    def _pull(self) -> Iterator[VideoFrame]:
        with contextlib.suppress(NoFrameYet, NoFrameLeft):
            while True:
                yield self._sink.pull()  # type: ignore[misc]  # a sink of video
