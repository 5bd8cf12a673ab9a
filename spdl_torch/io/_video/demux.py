"""Read those packets of a video that some of its frames need."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import TYPE_CHECKING, Any, SupportsFloat

from av.bitstream import BitStreamFilterContext
from av.error import FFmpegError

from spdl_torch.errors import DecodeError

from .._source import source_name
from .codec import VideoCodec
from .opening import open_video
from .packets import VideoPackets, displayed, to_ticks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from av.container import InputContainer
    from av.packet import Packet
    from av.video.stream import VideoStream

    from .._config import DemuxConfig
    from .._source import Source

__all__ = ["demux_known", "demux_video", "filter_packets", "read_spans"]

_GENERATE_PTS = 1
"""FFmpeg's AVFMT_FLAG_GENPTS."""

_FIRST_STEP_SECONDS = 0.5
"""The first distance to seek back for a keyframe; keyframes are mostly 0.5 to 10 s apart."""


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
            ``start <= time < end`` needs, from the keyframe before them on. None reads everything.
        demux_config: options for opening the container, from :func:`demux_config`.
        bsf: FFmpeg's description of bitstream filters to apply to the packets.
        name: the source's name in errors; by default its path, or ``<bytes>``.

    Returns: packets from which :func:`decode_packets` decodes exactly those frames.
    Raises:
        DecodeError: not a video, damaged, or no frame in the window.
        OSError: a path cannot be read.
        ValueError: FFmpeg has no such format, or refuses ``bsf``.
    """
    return demux_known(src, timestamp, demux_config, bsf, name)[0]


def demux_known(
    src: Source,
    timestamp: tuple[SupportsFloat | str, SupportsFloat | str] | None,
    config: DemuxConfig | None,
    bsf: str | None,
    name: str | None,
) -> tuple[VideoPackets, str]:
    """Do the same, and return FFmpeg's name of the container's format, too."""
    name = name or source_name(src)
    window = None if timestamp is None else _window(timestamp)
    with open_video(src, config, name) as (container, stream):
        spans = [(-math.inf, math.inf)] if window is None else [window]
        packets = read_spans(container, stream, spans, name, window, bsf)
        container_format = container.format.name
    if not packets.times:
        raise DecodeError(f"{name}: no frame {_where(window)}.")
    return packets, container_format


def read_spans(
    container: InputContainer,
    stream: VideoStream,
    spans: Sequence[tuple[float, float]],
    name: str,
    window: tuple[float, float] | None = None,
    bsf: str | None = None,
) -> VideoPackets:
    """Read the packets that the frames displayed in some spans of time need.

    Args:
        spans: starts and ends in seconds, ascending and apart. The frames displayed at a start and
            at an end are included.
        window: the ``timestamp`` of the result.
        bsf: as in :func:`demux_video`.

    Raises: DecodeError: the video has no packets.
    """
    # FFmpeg would invent display times where the container has none; they are wrong where two
    # B-frames follow each other.
    container.flags &= ~_GENERATE_PTS
    codec = VideoCodec.of(stream)
    reader = _Reader(container, stream, codec)
    for start, end in spans:
        reader.read(start, end)
    if not reader.packets:
        raise DecodeError(f"{name}: no frame in it.")
    found = reader.packets if bsf is None else filter_packets(reader.packets, stream, bsf)
    return VideoPackets(name, codec, found, window, stream.codec_context)


def filter_packets(packets: list[Packet[Any]], stream: VideoStream, bsf: str) -> list[Packet[Any]]:
    """Apply FFmpeg's bitstream filters to the packets of a stream.

    Raises: ValueError: FFmpeg refuses the filters.
    """
    try:
        filters = BitStreamFilterContext(bsf, stream)
    except (FFmpegError, ValueError) as error:
        raise ValueError(f"bsf: FFmpeg refuses {bsf!r}: {error}.") from error
    filtered = [out for packet in packets for out in filters.filter(packet)]
    return [*filtered, *filters.filter(None)]


class _Reader:
    """Collects packets, each once."""

    def __init__(self, container: InputContainer, stream: VideoStream, codec: VideoCodec) -> None:
        self.packets: list[Packet[Any]] = []
        self._container = container
        self._stream = stream
        self._codec = codec
        self._time_base = Fraction(*codec.time_base)
        self._seen: set[tuple[int | None, int]] = set()
        self._incoming = _packets(container, stream)
        first = next(self._incoming, None)
        if first is None:
            self._can_seek = False
        elif first.dts is None and first.pts is None:  # a raw stream
            self._can_seek = False
            self._incoming = _counted(first, self._incoming, stream)
        else:
            self._can_seek = first.pts is not None or codec.counts_after_seek
            self._incoming = itertools.chain([first], self._incoming)
            self._opening = displayed(first) or 0
            self._lowest = min(self._opening, first.dts or 0)

    def read(self, start: float, end: float) -> None:
        """Add the packets that the frames from ``start`` to ``end`` need, in seconds."""
        if self._can_seek and not math.isinf(start):
            self._seek(math.floor(start / float(self._time_base) + 1e-6))
        stop = to_ticks(end, self._time_base)
        for packet in _until(self._incoming, stop, 1 + self._codec.reorder_depth):
            # The way from a keyframe far back may begin in the span before.
            identity = displayed(packet), packet.size
            if identity not in self._seen:
                self._seen.add(identity)
                self.packets.append(packet)

    def _seek(self, start: int) -> None:
        """Continue from a keyframe that is displayed at ``start`` (in ticks) or before."""
        if start <= self._opening and not self.packets:
            return
        step = max(1, round(_FIRST_STEP_SECONDS / self._time_base))
        target = start
        while target > self._lowest:
            if not self._land(target):
                return
            reach = _until(self._incoming, start, 0)
            key = next((packet for packet in reach if packet.is_keyframe), None)
            time = None if key is None else displayed(key)
            if key is not None and time is not None and time <= start - self._unsure_ticks(key):
                self._incoming = itertools.chain([key], self._incoming)
                return
            # Containers seek by dts, and some to any packet. So the keyframe found may be displayed
            # too late, or none may come before ``start``: look further back, in growing steps.
            target, step = target - step, 2 * step
        self._land(self._lowest)

    def _land(self, target: int) -> bool:
        try:
            self._container.seek(target, stream=self._stream)
        except (FFmpegError, OSError):  # the source cannot seek: read on from here
            self._can_seek = False
            return False
        self._incoming = _packets(self._container, self._stream)
        return True

    def _unsure_ticks(self, key: Packet[Any]) -> Fraction:
        if key.pts is not None:
            return Fraction(0)
        rate = Fraction(*self._codec.frame_rate) or Fraction(25)
        return self._codec.num_unsure / (rate * self._time_base)


def _until(packets: Iterator[Packet[Any]], stop: float, num_more: int) -> Iterator[Packet[Any]]:
    """Yield the packets of all frames that are displayed until ``stop``, in ticks."""
    for packet in packets:
        yield packet
        # Packets come in the order of dts, and no frame is displayed before its dts.
        if packet.dts is not None and packet.dts > stop:
            if packet.pts is None:  # counted: as many frames come out only with more input
                yield from itertools.islice(packets, num_more)
            return


def _packets(container: InputContainer, stream: VideoStream) -> Iterator[Packet[Any]]:
    try:
        for packet in container.demux(stream):
            if packet.size:
                yield packet
    except IndexError as error:
        # PyAV raises it after the last packet: it looks up all streams of the container, those
        # included that FFmpeg found only while reading, which PyAV does not know.
        if not _is_from_stream_lookup(error):
            raise  # from the user's own file object


def _is_from_stream_lookup(error: IndexError) -> bool:
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    return place is not None and place.tb_frame.f_code.co_name == "_get_streams"


def _counted(
    first: Packet[Any], others: Iterator[Packet[Any]], stream: VideoStream
) -> Iterator[Packet[Any]]:
    rate = stream.average_rate or stream.guessed_rate or Fraction(25)
    for number, packet in enumerate(itertools.chain([first], others)):
        packet.pts = None  # some packets have one, but all are counted
        packet.dts = round(number / rate / (stream.time_base or rate))
        yield packet


def _window(timestamp: tuple[SupportsFloat | str, SupportsFloat | str]) -> tuple[float, float]:
    # A string may be a fraction, as in SPDL.
    start, end = (float(Fraction(t) if isinstance(t, str) else t) for t in timestamp)
    if not start < end:
        raise ValueError(f"timestamp must be (start, end) with start < end, got {timestamp}.")
    return start, end


def _where(window: tuple[float, float] | None) -> str:
    return "in it" if window is None else "in [{:g}, {:g}) s".format(*window)
