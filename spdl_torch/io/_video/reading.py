"""An open video: what its container states, and its packets: those that some of its frames need, or
all."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, TypeAlias

from av.error import FFmpegError

from spdl_torch.errors import DecodeError
from spdl_torch.handlers import unless_of_handler

from ...checks import check_whole
from ...locks import RLock
from ...scopes import scope
from .codec import Label, VideoCodec, is_entry, last_duration, tells_keyframes, tick_until, to_ticks
from .opening import packets_of
from .samplers import VideoInfo

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.packet import Packet
    from av.video.codeccontext import VideoCodecContext

    from .opening import MediaFile
    from .packets import VideoPackets

_GENERATE_PTS = 1
"""FFmpeg's AVFMT_FLAG_GENPTS."""

_NO_TIMES = 0x80
"""FFmpeg's AVFMT_NOTIMESTAMPS."""

_MOST_AHEAD = 16
"""The most frames that come before another one in a stream and after it on the screen."""

_FIRST_STEP_SECONDS = 0.5
"""The first distance to seek back for an entry; these are mostly 0.5 to 10 s apart."""

_LATEST = 1 << 60
"""No video lasts so many ticks; FFmpeg's numbers end at eight times as many."""

_BEYOND = 10**12
"""A time after the end of any video, in ticks, with which FFmpeg still calculates."""

_Facts: TypeAlias = tuple[float, float, float, int]
"""The start and the duration in seconds, the frames per second, and their number."""


class UnsureError(DecodeError):
    """What was read does not tell the frames with certainty; a decode of all does."""


class Decoder:
    """The demuxer's own decoder, which one thread at a time has."""

    def __init__(self, context: VideoCodecContext, *, is_counted: bool) -> None:
        self._context, self._is_counted = context, is_counted
        self.lock = RLock()
        """Held while a thread has it."""

    @scope
    def begun(self, num_threads: int = 1) -> Iterator[VideoCodecContext]:
        """The decoder, as before its first packet; ``num_threads`` are those of the first time."""
        with self.lock:
            context = self._context
            if not context.is_open:
                check_whole("decoding", least=0, num_threads=num_threads)
                context.thread_count = num_threads
                # Decoding several frames at once delays their output, which breaks counting.
                context.thread_type = "SLICE" if self._is_counted else "AUTO"
            try:
                yield context
            finally:
                context.skip_frame = "DEFAULT"
                context.flush_buffers()


class Video:
    """An open video: what its container says of its packets, and these in turn.

    There are two ways to a frame. The definition is a decode from the first packet on, which is
    what PyAV gives. The fast way begins at a packet near the frame; it is open to containers that
    list their packets and to codecs that tell whether it went right.
    """

    def __init__(
        self, container: InputContainer, stream: Any, file: MediaFile, *, is_fast: bool = True
    ) -> None:
        """Take a container that was just opened; ``is_fast=False`` closes the fast way."""
        # FFmpeg would invent display times where the container has none; they are wrong where two
        # B-frames follow each other.
        container.flags &= ~_GENERATE_PTS
        self.container, self.file, self.source = container, file, file.name
        self.stream = stream
        self.codec = VideoCodec.of(self.stream)
        self.packets = packets_of(container, stream)
        """Those that come next."""
        first = next(self.packets, None)
        if first is None:
            raise no_frame(file.name)
        self.first = first
        """The first packet of all; it still comes."""
        self.packets = itertools.chain([first], self.packets)
        kind = container.format.name
        self.is_mp4, self.is_matroska = "mp4" in kind, "matroska" in kind
        is_raw = bool(int(container.format.flags) & _NO_TIMES)
        if is_raw:
            self.packets = _numbered(self.packets, self.codec)
        self.is_counted = is_raw or (first.pts is None and kind == "avi")
        """Whether frames are counted, for the container has no times (AVI, raw streams)."""
        is_complete = 0 < stream.frames == len(stream.index_entries)
        self.has_list = self.is_matroska or (is_complete and (self.is_mp4 or kind == "avi"))
        """Whether the container lists its packets, all of them."""
        can_enter = self.has_list and not self.is_counted
        self.is_fast = is_fast and can_enter and tells_keyframes(self.codec)
        """Whether the fast way is open."""
        self.decoder = Decoder(self.stream.codec_context, is_counted=self.is_counted)
        self._has_moved = False  # whether others than the packets from the first on come next

    @property
    def is_whole_mp4(self) -> bool:
        """Whether it is an MP4 whose list of packets ends within the file."""
        if not (self.is_mp4 and self.has_list):
            return False
        last = self.stream.index_entries[-1]
        return bool(last.pos + last.size <= self.container.size)

    def keep_first(self) -> None:
        """Leave out all packets but the first, which is an image."""
        self.first.pts = self.first.dts = 0  # some formats give it no time
        self.packets, self.is_fast = iter([self.first]), False

    def near(self, spans: Sequence[tuple[float, float]]) -> list[Packet[Any]]:
        """Return the packets that the frames displayed in some spans need, from entries on.

        Args:
            spans: starts and ends in seconds, ascending and apart. The frames displayed at a start
                and at an end are included.

        Raises: UnsureError: no way leads to an entry.
        """
        found: list[Packet[Any]] = []
        seen = set()
        for start, end in spans:
            if not math.isinf(start):
                self._seek(tick_until(start, self.codec.tick))
            for packet in self._until(to_ticks(end, self.codec.tick)):
                # The way from an entry far back may begin in the span before.
                identity = packet.pos, packet.pts, packet.size
                if identity not in seen:
                    seen.add(identity)
                    found.append(packet)
        return found

    def from_first(self, end: float) -> list[Packet[Any]]:
        """Return the packets that all frames until a time in seconds need."""
        return list(self._until(to_ticks(end, self.codec.tick)))

    def ascending(self) -> Iterator[Packet[Any]]:
        """Yield the packets to the end. Raises: DecodeError: their times go back, as in several
        videos glued together."""
        last: int | None = None
        self._has_moved = True
        for packet in self.packets:
            if packet.dts is not None:
                if last is not None and packet.dts < last:
                    raise goes_back(self, last, packet.dts)
                last = packet.dts
            yield packet

    def land(self, target: int) -> bool:
        """Go on from where FFmpeg's seek to a time, in ticks, leads; return False if it fails."""
        self._has_moved = True  # also if it fails
        try:
            self.container.seek(min(target, _LATEST), stream=self.stream)
        except unless_of_handler(FFmpegError, OSError):
            return False
        self.packets = packets_of(self.container, self.stream)
        return True

    def _until(self, stop: float, most: int = _MOST_AHEAD) -> Iterator[Packet[Any]]:
        """Yield the packets of all frames that are displayed until ``stop``, in ticks."""
        num_ahead = 0
        for packet in self.packets:
            yield packet
            time = packet.dts if self.is_counted else packet.pts
            if time is not None:
                num_ahead = num_ahead + 1 if time > stop else 0
                if num_ahead > most:
                    return

    def _seek(self, start: float) -> None:
        """Continue from an entry that is displayed at ``start`` (in ticks) or before, or from the
        first packet."""
        first = self.first.pts or 0
        lowest = min(first, self.first.dts or 0)
        step = max(1, round(_FIRST_STEP_SECONDS / self.codec.tick))
        target = int(min(start, _LATEST)) if start > first else lowest
        while target > lowest and self.land(target):
            for packet in self._until(start, most=0):
                if packet.pts is not None and packet.pts <= start and is_entry(packet, self.codec):
                    self.packets = itertools.chain([packet], self.packets)
                    return
            # Containers seek by dts, and some to any packet. So the entry found may be displayed
            # too late, or none may come before ``start``: look further back, in growing steps.
            target, step = target - step, 2 * step
        if not self._has_moved:
            return
        # FFmpeg does not find a first packet that the container does not mark as a keyframe, and
        # lands on any other then, also where it says that it has failed.
        there = list(itertools.islice(self.packets, 1)) if self.land(lowest) else []
        if [(each.pos, each.size) for each in there] != [(self.first.pos, self.first.size)]:
            raise UnsureError(f"{self.source}: the way back to its start was not found.")
        self.packets = itertools.chain(there, self.packets)


def facts_of(video: Video) -> VideoInfo:
    """Return the facts about a video that was just opened.

    They are the container's statements where it lists its packets, and else those of its packets,
    all of which are read for that; of these the times are known, and not which of them the decoder
    makes a frame of.

    Raises: DecodeError: no frame in it, or its times go back.
    """
    facts = (_stated(video) if video.has_list else None) or _surveyed(video)
    start, seconds, per_second, count = facts
    return VideoInfo(
        source=video.source,
        codec=video.codec.name,
        start_seconds=start,
        duration_seconds=seconds,
        frame_rate=per_second,
        num_frames=count,
        width=video.codec.width,
        height=video.codec.height,
    )


def _stated(video: Video) -> _Facts | None:
    """Return what the container says; None where it leaves something out."""
    stream, tick = video.stream, float(video.codec.tick)
    rate = Fraction(*video.codec.frame_rate)
    first = Label.of(video.first, video.codec)
    time = first.dts if video.is_counted else first.pts
    start = time if first.is_shown else stream.start_time
    if start is None or time is None or not rate:
        return None
    # Matroska's with another start is a duration in some files, and the end in others.
    seconds = 0.0 if video.is_matroska and start else float(stream.duration or 0) * tick
    if video.is_matroska and not start and not seconds:
        seconds = _tagged_seconds(stream.metadata.get("DURATION", ""))
        if not seconds and len(video.container.streams) == 1:
            seconds = (video.container.duration or 0) / 1e6
    seconds = seconds or _seconds_by_packets(video, start)
    if not seconds > 0:
        return None
    count = round(seconds * rate)
    if stream.frames:  # with an edit list not all of them are displayed
        count = min(count, stream.frames)
    return start * tick, seconds, float(rate), count


def _seconds_by_packets(video: Video, start: int) -> float:
    """Return the duration by the last packets; 0 where these are not to be had.

    start: when the first frame is displayed, in ticks.
    """
    if not video.land(_BEYOND):
        return 0.0
    labels = [Label.of(packet, video.codec) for packet in video.packets]
    times = [label.pts for label in labels if label.is_shown and label.pts is not None]
    if not times:
        return 0.0
    last = last_duration(labels) or round(video.codec.ticks_of_a_frame)
    return float(max(times) + last - start) * float(video.codec.tick)


def _tagged_seconds(duration: str) -> float:
    """Return the seconds of Matroska's tag for a stream, such as 00:00:02.040000000; 0 for another
    text."""
    try:
        hours, minutes, seconds = map(float, duration.split(":"))
    except ValueError:
        return 0.0
    return 3600 * hours + 60 * minutes + seconds


def _surveyed(video: Video) -> _Facts:
    """Return the facts that all packets tell; those before the first keyframe are not decoded."""
    labels = [Label.of(packet, video.codec) for packet in video.ascending()]
    if not video.is_counted and tells_keyframes(video.codec):
        labels = labels[next((k for k, label in enumerate(labels) if label.is_entry), 0) :]
    shown = [label for label in labels if label.is_shown]
    if not shown:
        raise no_frame(video.source)
    times = [label.dts if video.is_counted else label.pts for label in shown]
    # What is displayed before the first keyframe refers to frames before it, which are not there.
    first = times[0]
    times = [time for time in times if time is None or first is None or time >= first]
    known = [time for time in times if time is not None] or [shown[0].dts or 0]
    step = float(video.codec.ticks_of_a_frame) or max(1, shown[0].duration)
    num_before = next((k for k, time in enumerate(times) if time is not None), 0)
    start, last, tick = min(known) - num_before * step, max(known), float(video.codec.tick)
    ticks = last - start + (last_duration(labels) or step)
    if len(known) < len(times):  # what has no time may come before and after the others
        ticks = len(times) * step
    elif last > start:
        step = (last - start) / (len(times) - 1)
    return start * tick, ticks * tick, 1 / (step * tick), len(times)


def no_frame(name: str, window: tuple[float, float] | None = None) -> DecodeError:
    """Return the error for a video, or a window of it in seconds, without a frame."""
    where = "it" if window is None else "[{:g}, {:g}) s".format(*window)
    return DecodeError(f"{name}: no frame in {where}.")


def goes_back(video: Video | VideoPackets, before: float, after: float) -> DecodeError:
    """Return the error for times that go back, in ticks: none means one frame then."""
    tick = float(video.codec.tick)
    return DecodeError(
        f"{video.source}: after the frame at {before * tick:.3f} s comes one at "
        f"{after * tick:.3f} s, so that a time does not say which frame is meant: it may be "
        "several videos glued together, or packets may be missing. Load it whole, or choose "
        "frames by index."
    )


def _numbered(packets: Iterator[Packet[Any]], codec: VideoCodec) -> Iterator[Packet[Any]]:
    """Number the packets, whatever FFmpeg made of their times."""
    step = codec.ticks_of_a_frame or Fraction(1, 25) / codec.tick
    for number, packet in enumerate(packets):
        packet.pts = None  # FFmpeg gives some packets a time, which it has counted, too
        packet.dts = round(number * step)
        yield packet
