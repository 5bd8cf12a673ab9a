"""Read packets of a container from where decoding may begin with certainty."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from av.error import FFmpegError

from spdl_torch.errors import DecodeError

from .codec import VideoCodec, rate_of
from .entry import can_have_entries, is_entry, is_hidden
from .opening import can_seek
from .packets import Label, to_ticks
from .reference_numbers import ReferenceNumbers
from .segment import ends_with_segment
from .slowness import say_once

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from av.audio.stream import AudioStream
    from av.container import InputContainer
    from av.packet import Packet
    from av.video.stream import VideoStream

_FIRST_STEP_SECONDS = 0.5
"""The first distance to seek back for an entry; these are mostly 0.5 to 10 s apart."""

_MOST_AHEAD = 16
"""The most frames that come before another one in a stream and after it on the screen."""

_GENERATE_PTS = 1
"""FFmpeg's AVFMT_FLAG_GENPTS."""

_NO_TIMES = 0x80
"""FFmpeg's AVFMT_NOTIMESTAMPS."""

_BEYOND = 10**12
"""A time after the end of any video, in ticks, with which FFmpeg still calculates."""

_TRIES = 8
"""How often FFmpeg may ask to read again."""

_SLOW_BYTES = 1 << 26
"""Reading more than that for nothing is said."""

_MOST_KEPT_BYTES = 1 << 26
"""A video of more, whose container does not list its packets, is read twice for a clip."""


class PacketReader:
    """Collects packets, each once.

    Seeks only where the container lists its packets (MP4 and MOV, Matroska and WebM, AVI) and the
    source can seek. All else is read from its beginning to its end, and only what is needed is
    kept: without a list, nothing but the end shows that no time comes twice, as in files that were
    glued together.
    """

    def __init__(self, container: InputContainer, stream: VideoStream, name: str) -> None:
        # FFmpeg would invent display times where the container has none; they are wrong where two
        # B-frames follow each other.
        container.flags &= ~_GENERATE_PTS
        self.packets: list[Packet[Any]] = []
        self.container, self.stream, self.name = container, stream, name
        self.codec = codec = VideoCodec.of(stream)
        self.doubt: str | None = None
        """What was seen, in packets that were not kept, that makes times ambiguous."""
        self.is_whole = False
        """Whether all packets were kept, from the first to the last."""
        self.is_from_start = True
        self.may_go_on = True
        """Whether there may be more than the container lists, such as a file appended to it."""
        self.may_lack = False
        """Whether packets in between may be missing: nothing in the container would show it."""
        self._time_base = Fraction(*codec.time_base)
        self._seen: set[tuple[int | None, ...] | None] = set()
        self._times = _Times()
        self._numbers = ReferenceNumbers(codec)
        self._at_end = self._has_dropped = self._is_surveyed = self._has_moved = False
        self._skipped_bytes = 0
        incoming = packets_of(container, stream)
        first = next(incoming, None)
        self.is_counted = self.is_listed = self.has_list = False
        if first is not None:
            is_raw = bool(int(container.format.flags) & _NO_TIMES)
            self.is_counted = is_raw or (first.pts is None and container.format.name == "avi")
            self.has_list = _has_list(container, stream)
            self.may_lack = "mp4" not in container.format.name and not self.has_list
            self.is_listed = (
                self.has_list
                and can_seek(container)
                and (not self.is_counted or codec.has_delay_of_one)
            )
            self.may_go_on = not self.is_listed or (
                "matroska" in container.format.name and not ends_with_segment(container)
            )
            incoming = itertools.chain([first], incoming)
            if is_raw:
                incoming = _counted(incoming, stream)
            self._first = _identity(first)
            self._opens_timed = self.is_counted or first.pts is not None
            self._opens_shown = Label.of(first, codec).is_shown
            self._opening = _displayed(first) or 0
            self._lowest = min(self._opening, first.dts or 0)
        self._incoming = self._watched(incoming)

    def read(self, start: float, end: float) -> None:
        """Add the packets that the frames from ``start`` to ``end`` need, in seconds."""
        if not math.isinf(start):
            ticks = math.floor(start / float(self._time_base) + 1e-6)
            if self.is_listed:
                self._seek(ticks)
            elif not self.is_counted:
                self._skim(ticks)
        came = [*self._until(to_ticks(end, self._time_base))]
        for packet in came:
            # The way from an entry far back may begin in the span before.
            identity = _identity(packet) if self.is_listed else None
            if identity is None or identity not in self._seen:
                self._seen.add(identity)
                self.packets.append(packet)
        if not self.is_counted and any(map(self._numbers.lacks, came)):
            self.doubt = self.doubt or "a picture that others refer to is missing in it"
        self.is_whole = self._at_end and self.is_from_start and not self._has_dropped

    @property
    def starts_at(self) -> int | None:
        """The display time of the first frame, in ticks, by the first packet; by the container's
        word where that is not displayed. None where only all packets tell."""
        if self.codec.name == "vvc" or not self._opens_timed:
            return None  # its first frames may come behind a later one
        return self._opening if self._opens_shown else self.stream.start_time

    def find_end(self) -> int | None:
        """Return when the last frame ends, in ticks; None where that is not to be had by a seek."""
        if not self.is_listed or not self._land(_BEYOND):
            return None
        self._has_moved = True
        rate = Fraction(*self.codec.frame_rate)
        step = round(1 / (rate * self._time_base)) if rate else 0
        ends = ((_displayed(packet) or 0) + (packet.duration or step) for packet in self._incoming)
        return max(ends, default=None)

    def survey(self, *, keeps_all: bool) -> tuple[list[Label], bool]:
        """Read everything, before anything else was read.

        keeps_all: whether packets are kept however large they are.

        Returns: the labels of all packets; and whether the packets were kept, so that ``read`` goes
            on from the first of them. If not, a new reader of the same video is needed.
        """
        labels: list[Label] = []
        kept: list[Packet[Any]] = []
        for packet in self._incoming:
            labels.append(Label.of(packet, self.codec))
            self._skip(packet)
            if keeps_all or self._skipped_bytes <= _MOST_KEPT_BYTES:
                kept.append(packet)
            else:
                kept.clear()
        self.check_times(labels)
        self.mark_as_surveyed()
        self._at_end = False
        self._incoming = self._watched(iter(kept))
        return labels, len(kept) == len(labels)

    def check_times(self, labels: Sequence[Label]) -> None:
        """Raise a DecodeError if the times of an MXF stand behind its packets, out of reach: those
        that FFmpeg guesses without them are a frame late."""
        lacks_times = any(label.pts is None for label in labels)
        if lacks_times and self.container.format.name == "mxf" and not can_seek(self.container):
            raise DecodeError(
                f"{self.name}: the times of its frames are in a table at its end, which a source "
                "that cannot seek does not reach first: pass the file's bytes, or its path."
            )

    def mark_as_surveyed(self) -> None:
        """Look no more for what makes times ambiguous: all packets were looked at."""
        self._is_surveyed = True

    def look_at_the_rest(self) -> None:
        """Read to the end of the video, where only that shows that no time comes twice."""
        if self._at_end or self.is_counted or self._is_surveyed:
            return
        if self.may_go_on and (not self.is_listed or self._land(_BEYOND)):
            for packet in self._incoming:
                self._skip(packet)

    def _skim(self, start: int) -> None:
        """Read on from an entry that is displayed at ``start`` (in ticks) or before."""
        held: list[Packet[Any]] = []
        for packet in self._incoming:
            time = packet.pts
            if time is not None and time <= start and is_entry(packet, self.codec):
                for skipped in held:
                    self._skip(skipped)
                    self._numbers.forget()
                self._has_dropped = self._has_dropped or bool(held)
                self.is_from_start = self.is_from_start and not (held and not self.packets)
                held = []
            held.append(packet)
            if time is not None and time > start:
                break
        self._incoming = itertools.chain(held, self._incoming)

    def _skip(self, packet: Packet[Any]) -> None:
        if self._is_surveyed:
            return
        self._skipped_bytes += packet.size
        if self._skipped_bytes > _SLOW_BYTES:
            say_once(
                self.name,
                f"{self.container.format.name} has no list of its packets, so that the whole file "
                "is read for each part of it. Another container has one: ffmpeg -i FILE -c copy "
                "FILE.mp4",
            )

    def _seek(self, start: int) -> None:
        """Continue from an entry that is displayed at ``start`` (in ticks) or before."""
        if start <= self._opening and not self.packets:
            if self._has_moved:
                self._return_to_first()
            return
        if not can_have_entries(self.codec):
            return  # what came beside the first packet, as a palette, does not come after a seek
        step = max(1, round(_FIRST_STEP_SECONDS / self._time_base))
        target = start
        while target > self._lowest:
            if not self._land(target):
                break
            reach = self._until(start, most_ahead=0)
            entry = next((packet for packet in reach if is_entry(packet, self.codec)), None)
            time = None if entry is None else _displayed(entry)
            if entry is not None and time is not None and time <= start - self._unsure_ticks(entry):
                self._incoming = itertools.chain([entry], self._incoming)
                self.is_from_start = self.is_from_start and bool(self.packets)
                return
            # Containers seek by dts, and some to any packet. So the entry found may be displayed
            # too late, or none may come before ``start``: look further back, in growing steps.
            target, step = target - step, 2 * step
        self._return_to_first()

    def _return_to_first(self) -> None:
        """Continue from the first packet, or doubt that these are all.

        FFmpeg does not find a first packet that the container does not mark as a keyframe, and
        lands on any other then, also where it says that it has failed.
        """
        landed = self._land(self._lowest)
        first = next(self._incoming, None) if landed else None
        if first is None or _identity(first) != self._first:
            self.doubt = self.doubt or "the way back to its first packet was not found"
            self._has_dropped = True
        if first is not None:
            self._incoming = itertools.chain([first], self._incoming)

    def _land(self, target: int) -> bool:
        try:
            self.container.seek(target, stream=self.stream)
        except (FFmpegError, OSError):
            return False
        self._times = _Times()
        self._numbers.forget()
        self._at_end = False
        self._incoming = self._watched(packets_of(self.container, self.stream))
        return True

    def _unsure_ticks(self, entry: Packet[Any]) -> Fraction:
        if entry.pts is not None:
            return Fraction(0)
        rate = Fraction(*self.codec.frame_rate) or Fraction(25)
        return self.codec.num_unsure / (rate * self._time_base)

    def _until(self, stop: float, most_ahead: int = _MOST_AHEAD) -> Iterator[Packet[Any]]:
        """Yield the packets of all frames that are displayed until ``stop``, in ticks."""
        num_ahead = 0
        for packet in self._incoming:
            yield packet
            if packet.pts is not None:
                num_ahead = num_ahead + 1 if packet.pts > stop else 0
                if num_ahead > most_ahead:
                    return
            elif self.is_counted and packet.dts is not None and packet.dts > stop:
                # As many frames come out only with more input.
                yield from itertools.islice(self._incoming, 1 + self.codec.reorder_depth)
                return

    def _watched(self, packets: Iterator[Packet[Any]]) -> Iterator[Packet[Any]]:
        is_watched = self.may_go_on and not self.is_counted and not self._is_surveyed
        for packet in packets:
            if is_watched and self.doubt is None:
                self.doubt = self._times.doubt(packet, self.codec)
            yield packet
        self._at_end = True


class _Times:
    """The times of consecutive packets."""

    def __init__(self) -> None:
        self._last: int | None = None
        self._all: set[int] = set()

    def doubt(self, packet: Packet[Any], codec: VideoCodec) -> str | None:
        """Return what is wrong with the next packet's times, if anything is."""
        if packet.is_discard or is_hidden(packet, codec):
            return None
        if packet.pts is None:
            return "it has packets without a time"
        if packet.pts in self._all:
            return "it has several packets of one time"
        self._all.add(packet.pts)
        if packet.dts is not None:
            if self._last is not None and packet.dts < self._last:
                return "its times go back"
            self._last = packet.dts
        return None


def _has_list(container: InputContainer, stream: VideoStream) -> bool:
    """Return whether the container lists its packets, all of them."""
    name = container.format.name
    if "matroska" in name:
        return True
    return ("mp4" in name or name == "avi") and 0 < stream.frames == len(stream.index_entries)


def _identity(packet: Packet[Any]) -> tuple[int | None, ...]:
    return packet.pos, packet.pts, packet.dts, packet.size


def _displayed(packet: Packet[Any]) -> int | None:
    """Return the display time of a packet's frame in ticks, estimated where frames are counted."""
    return packet.dts if packet.pts is None else packet.pts


def packets_of(
    container: InputContainer, stream: AudioStream | VideoStream
) -> Iterator[Packet[Any]]:
    """Yield the packets of a stream that hold data."""
    for tries_left in reversed(range(_TRIES)):
        try:
            for packet in container.demux(stream):
                if packet.size:
                    yield packet
            return
        except BlockingIOError as error:
            # FFmpeg's at random bytes in a transport stream, after which there is more.
            if not (tries_left and isinstance(error, FFmpegError)):
                raise  # or of the user's own file object
        except IndexError as error:
            # PyAV raises it after the last packet: it looks up all streams of the container, those
            # included that FFmpeg found only while reading, which PyAV does not know.
            if not _is_from_stream_lookup(error):
                raise  # from the user's own file object
            return


def _is_from_stream_lookup(error: IndexError) -> bool:
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    return place is not None and place.tb_frame.f_code.co_name == "_get_streams"


def _counted(packets: Iterator[Packet[Any]], stream: VideoStream) -> Iterator[Packet[Any]]:
    rate = rate_of(stream) or Fraction(25)
    for number, packet in enumerate(packets):
        packet.pts = None  # FFmpeg gives some packets a time, which it has counted, too
        packet.dts = round(number / rate / (stream.time_base or rate))
        yield packet
