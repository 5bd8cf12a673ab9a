"""The packets of a video as they come, and what makes their times doubtful."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from av.error import FFmpegError

from .codec import VideoCodec
from .entry import is_hidden
from .opening import can_seek
from .segment import ends_with_segment
from .slowness import say_once
from .stream_packets import counted, packets_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Self

    from av.container import InputContainer
    from av.packet import Packet
    from av.video.stream import VideoStream

_GENERATE_PTS = 1
"""FFmpeg's AVFMT_FLAG_GENPTS."""

_MOST_AHEAD = 16
"""The most frames that come before another one in a stream and after it on the screen."""

_NO_TIMES = 0x80
"""FFmpeg's AVFMT_NOTIMESTAMPS."""

_SLOW_BYTES = 1 << 26
"""Reading more than that for nothing is said."""


@dataclass(frozen=True, slots=True)
class Layout:
    """What a container says of its packets beside the packets themselves."""

    is_counted: bool
    """Whether frames are counted, for the container has no times (AVI, raw streams)."""
    has_list: bool
    """Whether it lists its packets, all of them."""
    is_listed: bool
    """Whether it does, and they can be sought."""
    may_lack: bool
    """Whether packets in between may be missing: nothing in the container would show it."""
    may_go_on: bool
    """Whether there may be more than it lists, such as a file appended to it."""

    @classmethod
    def of(
        cls, container: InputContainer, stream: VideoStream, first: Packet[Any], codec: VideoCodec
    ) -> Self:
        """Return the layout of an open container. first: its first packet."""
        name = container.format.name
        is_raw = bool(int(container.format.flags) & _NO_TIMES)
        is_counted = is_raw or (first.pts is None and name == "avi")
        has_list = _has_list(container, stream)
        is_listed = has_list and can_seek(container) and (not is_counted or codec.has_delay_of_one)
        return cls(
            is_counted=is_counted,
            has_list=has_list,
            is_listed=is_listed,
            may_lack="mp4" not in name and not has_list,
            may_go_on=not is_listed or ("matroska" in name and not ends_with_segment(container)),
        )


_EMPTY = Layout(is_counted=False, has_list=False, is_listed=False, may_lack=False, may_go_on=True)


class Incoming:
    """The packets of an open video, in turn; what was taken may be put back."""

    def __init__(self, container: InputContainer, stream: VideoStream, name: str) -> None:
        # FFmpeg would invent display times where the container has none; they are wrong where two
        # B-frames follow each other.
        container.flags &= ~_GENERATE_PTS
        self.container, self.stream, self.name = container, stream, name
        self.codec = VideoCodec.of(stream)
        self.doubt: str | None = None
        """What was seen, in packets that were not kept either, that makes times ambiguous."""
        self.at_end = False
        self._is_surveyed = False
        self._times = _Times()
        self._skipped_bytes = 0
        packets = packets_of(container, stream)
        self.first = next(packets, None)
        """The first packet of all; it still comes."""
        self.layout = _EMPTY
        if self.first is not None:
            self.layout = Layout.of(container, stream, self.first, self.codec)
            packets = itertools.chain([self.first], packets)
            if int(container.format.flags) & _NO_TIMES:
                packets = counted(packets, stream)
        self._packets = self._watched(packets)

    def __iter__(self) -> Iterator[Packet[Any]]:
        return self

    def __next__(self) -> Packet[Any]:
        return next(self._packets)

    def put_back(self, packets: Iterable[Packet[Any]]) -> None:
        """Let these come next."""
        self._packets = itertools.chain(packets, self._packets)

    def put_back_all(self, packets: Iterable[Packet[Any]]) -> None:
        """Let these come next, which are all that there are and have been looked at."""
        self.mark_as_surveyed()
        self.at_end = False
        self._packets = self._watched(packets)

    def mark_as_surveyed(self) -> None:
        """Look no more for what makes times ambiguous: all packets were looked at."""
        self._is_surveyed = True

    def land(self, target: int) -> bool:
        """Go on from where FFmpeg's seek to a time, in ticks, leads; return False if it fails."""
        try:
            self.container.seek(target, stream=self.stream)
        except (FFmpegError, OSError):
            return False
        self._times = _Times()
        self.at_end = False
        self._packets = self._watched(packets_of(self.container, self.stream))
        return True

    def until(self, stop: float, most_ahead: int = _MOST_AHEAD) -> Iterator[Packet[Any]]:
        """Yield the packets of all frames that are displayed until ``stop``, in ticks."""
        num_ahead = 0
        for packet in self:
            yield packet
            if packet.pts is not None:
                num_ahead = num_ahead + 1 if packet.pts > stop else 0
                if num_ahead > most_ahead:
                    return
            elif self.layout.is_counted and packet.dts is not None and packet.dts > stop:
                # As many frames come out only with more input.
                yield from itertools.islice(self, 1 + self.codec.reorder_depth)
                return

    def skip(self, packet: Packet[Any]) -> int:
        """Count a packet that is read for nothing, and say so once they are many; return the bytes
        of all of them."""
        if self._is_surveyed:
            return self._skipped_bytes
        self._skipped_bytes += packet.size
        if self._skipped_bytes > _SLOW_BYTES:
            say_once(
                self.name,
                f"{self.container.format.name} has no list of its packets, so that the whole file "
                "is read for each part of it. Another container has one: ffmpeg -i FILE -c copy "
                "FILE.mp4",
            )
        return self._skipped_bytes

    @property
    def rest_is_unknown(self) -> bool:
        """Whether only reading on to the end shows that no time comes twice."""
        is_known = self.at_end or self._is_surveyed or self.layout.is_counted
        return self.layout.may_go_on and not is_known

    def _watched(self, packets: Iterable[Packet[Any]]) -> Iterator[Packet[Any]]:
        is_watched = self.rest_is_unknown
        for packet in packets:
            if is_watched and self.doubt is None:
                self.doubt = self._times.doubt(packet, self.codec)
            yield packet
        self.at_end = True


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
