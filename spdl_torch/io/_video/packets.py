"""Encoded packets of a video and the times at which their frames are displayed."""

from __future__ import annotations

import math
from bisect import bisect_left
from fractions import Fraction
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeAlias, get_args

from av.packet import Packet, PacketSideData, PktSideDataT

from spdl_torch.errors import DecodeError

from .entry import is_checked, is_entry, is_hidden
from .kept_decoder import KeptDecoder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from av.video.codeccontext import VideoCodecContext

    from .codec import VideoCodec


_MOST_UNEVEN = 1.5
"""A step of more than so many others is not their rounding."""


_MOST_ROUNDED = 2.0**-50
"""How far a time that was computed from a tick may be off that, as a share of it."""


class UnsureError(DecodeError):
    """The packets do not tell which frame is displayed when; decoding all of the video does."""


class Label(NamedTuple):
    """What a container and a packet's header say of a frame."""

    pts: int | None
    dts: int | None
    duration: int
    is_entry: bool
    """Whether decoding may begin here."""
    is_shown: bool
    is_key: bool
    """Whether the container calls it a keyframe."""
    is_corrupt: bool
    """Whether the container calls it damaged."""

    @classmethod
    def of(cls, packet: Packet[Any], codec: VideoCodec) -> Self:
        """Return the label of a packet that has just been read."""
        shown = not packet.is_discard and not is_hidden(packet, codec)
        times = packet.pts, packet.dts, packet.duration or 0
        marks = is_entry(packet, codec), shown, packet.is_keyframe, packet.is_corrupt
        return cls(*times, *marks)


_Content: TypeAlias = "tuple[bytes, list[tuple[str, bytes]]]"
"""A packet's data, and what came beside it: kinds and bytes."""

_KINDS_BESIDE = get_args(PktSideDataT)
_beside: Any = PacketSideData  # its arguments are missing in PyAV's stubs


class _State(NamedTuple):
    source: str
    codec: VideoCodec
    timestamp: tuple[float, float] | None
    is_whole: bool
    is_counted: bool
    is_listed: bool
    upright: list[tuple[str, str]] | None
    labels: list[Label]
    packets: list[_Content]
    sequence: list[int] | None


class VideoPackets:
    """The encoded packets of a video, or of a window of it, in decoding order.

    May be decoded many times, by one thread at a time, and pickled.

    Each packet's own time is in its label; in its place the packet carries its number, which the
    decoder hands on to the frame. So every frame says which packet it is from, whatever the times
    are: missing, equal, or those of another stream.
    """

    def __init__(
        self,
        source: str,
        codec: VideoCodec,
        packets: list[Packet[Any]],
        timestamp: tuple[float, float] | None = None,
        context: VideoCodecContext | None = None,
        *,
        is_whole: bool = True,
        is_counted: bool = False,
        is_listed: bool = False,
        labels: list[Label] | None = None,
    ) -> None:
        self.source = source
        """The file's name in errors."""
        self.codec = codec
        self.packets = packets
        """PyAV's packets; each has its place in this list as its time."""
        self.timestamp = timestamp
        """The window in seconds, or None."""
        self.is_whole = is_whole
        """Whether these are all packets of the video."""
        self.is_counted = is_counted
        """Whether frames are counted, for the container has no times (AVI, raw streams)."""
        self.is_listed = is_listed
        """Whether the container lists all its packets, so that none can be missing in between."""
        self.labels = labels or [Label.of(packet, codec) for packet in packets]
        for number, packet in enumerate(packets):
            packet.pts = number
        self.sequence: list[int] | None = None
        """The times of all frames in the order in which they come out of the decoder, in ticks,
        where the packets do not tell; None where they do."""
        self.decoder = KeptDecoder(codec, packets, context, is_counted=is_counted)
        self._place_frames()

    def _place_frames(self) -> None:
        """Find the window's frames from the labels, or from the sequence once there is one."""
        self.display = display_times(self.labels, self.is_counted)
        """The display time of every packet's frame, in ticks."""
        self.numbers: list[int] = []
        """For each frame of the window its packet; in a sequence, its place among all frames."""
        if self.sequence is None:
            shown = shown_frames(self.labels, self.display)
        else:
            shown = [(time, number) for number, time in enumerate(self.sequence)]
        if self.timestamp is not None:
            start, end = (to_ticks(second, self.time_base) for second in self.timestamp)
            if not self._has_order:
                shown = []
            shown = shown[bisect_left(shown, (start, 0)) : bisect_left(shown, (end, 0))]
        self.times = [time for time, _ in shown]
        """The display times of the window's frames, ascending, in ticks."""
        self.numbers = [number for _, number in shown]

    def set_sequence(self, sequence: list[int] | None) -> None:
        """Take the times of all frames in the order in which they come out of the decoder."""
        self.sequence = sequence
        self._place_frames()

    @property
    def can_seek(self) -> bool:
        """Whether decoding may begin at any entry."""
        counts = self.is_listed and self.codec.has_delay_of_one
        return self.sequence is None and (not self.is_counted or counts)

    @property
    def _has_order(self) -> bool:
        return all(a <= b for a, b in pairwise(self.sequence or ()))

    def doubt(self, *, from_start: bool, may_lack: bool) -> str | None:
        """Return why the packets do not tell which frame is displayed when; None if they do.

        from_start: whether the first packet is the video's first, which need not be an entry.
        may_lack: whether packets in between may be missing, as in a broadcast.
        """
        first, labels = self.labels[0], self.labels
        if is_checked(self.codec.name) and not first.is_entry:
            return "it begins with frames that refer to others before"
        if not first.is_entry and not (from_start and first.is_key):
            return "it begins with no keyframe"
        dts = [label.dts for label in labels if label.dts is not None]
        if any(later < earlier for earlier, later in pairwise(dts)):
            return "its times go back"
        if self.is_counted:
            return None
        if may_lack and self.codec.reorder_depth and has_gap(labels):
            return "packets may be missing in it"
        times = [label.pts for label in labels if label.is_shown]
        if None in times:
            return "it has packets without a time"
        if len(set(times)) < len(times):
            return "it has several packets of one time"
        if from_start and min(self.display) < self.display[0]:
            return "it begins with frames that refer to others before"
        return None

    def is_corrupt(self, number: int) -> bool:
        """Return whether the container calls a packet damaged, and not only the way to the next."""
        this = self.labels[number]
        if not this.is_corrupt:
            return False
        # Where streams were glued together, one of the last packets of the first has the mark.
        following = (label for label in self.labels[number + 1 : number + 4] if label.is_entry)
        entry = next(following, None)
        return entry is None or (entry.dts or 0) >= (this.dts or 0)

    def check_order(self) -> None:
        """Raise a DecodeError if the frames' times go back: no time then means one frame."""
        for before, after in pairwise(self.sequence or ()):
            if after < before:
                tick = float(self.time_base)
                raise DecodeError(
                    f"{self.source}: after the frame at {before * tick:.3f} s comes one at "
                    f"{after * tick:.3f} s, so that a time does not say which frame is meant: it "
                    "may be several videos glued together, or packets may be missing. Load it "
                    "whole, or choose frames by index."
                )

    @property
    def num_packets(self) -> int:
        """The number of packets read, those before the window that decoding needs included."""
        return len(self.packets)

    @property
    def width(self) -> int:
        """The coded width in pixels, before a rotation."""
        return self.codec.width

    @property
    def height(self) -> int:
        """The coded height in pixels, before a rotation."""
        return self.codec.height

    @property
    def pix_fmt(self) -> str | None:
        """FFmpeg's name of the coded pixel format."""
        return self.codec.pix_fmt

    @property
    def frame_rate(self) -> tuple[int, int]:
        """The average frames per second, as numerator and denominator."""
        return self.codec.frame_rate

    @property
    def time_base(self) -> Fraction:
        """The length of one tick in seconds."""
        return Fraction(*self.codec.time_base)

    @property
    def timestamps(self) -> list[float]:
        """The display time of each frame of the window, in seconds, ascending."""
        return self.get_timestamps()

    @property
    def duration(self) -> float:
        """The seconds from the first frame of the window to the end of its last."""
        if self.timestamp is not None:
            start, end = self.timestamp
            return end - start
        return float((self.times[-1] - self.times[0] + self.last_ticks) * self.time_base)

    @property
    def end_seconds(self) -> float | None:
        """The end of the last frame that was read; None if how long it lasts is unknown."""
        if not self.last_ticks:
            return None
        return float((self.times[-1] + self.last_ticks) * self.time_base)

    @property
    def last_ticks(self) -> int:
        """How long the last frame that was read is displayed, in ticks; 0 if unknown."""
        return last_frame(self.labels, self.display)[1]

    def get_timestamps(self) -> list[float]:
        """Return the display time of each frame of the window, in seconds, ascending."""
        return [float(time * self.time_base) for time in self.times]

    def clone(self) -> Self:
        """Return the same packets with another decoder."""
        twin = type(self)(
            self.source,
            self.codec,
            self.packets,
            self.timestamp,
            is_whole=self.is_whole,
            is_counted=self.is_counted,
            is_listed=self.is_listed,
            labels=self.labels,
        )
        twin.decoder.upright = self.decoder.learned_upright()
        twin.set_sequence(self.sequence)
        return twin

    def __len__(self) -> int:
        """Return the number of frames in the window."""
        return len(self.times)

    def __repr__(self) -> str:
        window = "" if self.timestamp is None else " in [{:g}, {:g}) s".format(*self.timestamp)
        return (
            f"<VideoPackets of {self.source!r}: {len(self)} frames{window}, "
            f"{self.num_packets} packets, {self.codec!r}>"
        )

    def __getstate__(self) -> _State:
        return _State(
            self.source,
            self.codec,
            self.timestamp,
            self.is_whole,
            self.is_counted,
            self.is_listed,
            self.decoder.learned_upright(),
            self.labels,
            [_content(packet) for packet in self.packets],
            self.sequence,
        )

    def __setstate__(self, state: _State) -> None:
        time_base = Fraction(*state.codec.time_base)
        packets = [
            _packet(content, label, time_base)
            for content, label in zip(state.packets, state.labels, strict=True)
        ]
        VideoPackets.__init__(
            self,
            state.source,
            state.codec,
            packets,
            state.timestamp,
            is_whole=state.is_whole,
            is_counted=state.is_counted,
            is_listed=state.is_listed,
            labels=state.labels,
        )
        self.decoder.upright = state.upright
        self.set_sequence(state.sequence)


class ImagePackets(VideoPackets):
    """The encoded packet of one image, decoded as stored: nothing puts it upright."""

    def __init__(
        self, source: str, codec: VideoCodec, packets: list[Packet[Any]], *_: Any, **__: Any
    ) -> None:
        super().__init__(source, codec, packets)
        self.decoder.upright = []


def has_gap(labels: Sequence[Label]) -> bool:
    """Return whether a frame other than an entry comes late: what was before it may be lost."""
    steps = [
        (later.dts - earlier.dts, later.is_entry)
        for earlier, later in pairwise(labels)
        if earlier.dts is not None and later.dts is not None
    ]
    usual = min((step for step, _ in steps if step > 0), default=0)
    return any(step > 1.9 * usual and not is_entry for step, is_entry in steps)


def _content(packet: Packet[Any]) -> _Content:
    # A palette comes beside the data.
    beside = [(data.data_type, bytes(data)) for data in packet.iter_sidedata()]
    return bytes(packet), beside


def _packet(content: _Content, label: Label, time_base: Fraction) -> Packet[Any]:
    # FFmpeg's decoders read beyond the end: memory of its own has zeros there, bytes have anything.
    packet: Packet[Any] = Packet(len(content[0]))
    packet.update(content[0])
    packet.dts, packet.time_base = label.dts, time_base
    packet.duration = label.duration
    packet.is_keyframe = label.is_key
    for kind, beside in content[1]:
        data = _beside(_KINDS_BESIDE.index(kind), len(beside))
        data.update(beside)
        packet.set_sidedata(data)
    return packet


def shown_frames(labels: Sequence[Label], display: Sequence[int]) -> list[tuple[int, int]]:
    """Return the display time, in ticks, and the packet of each frame that is displayed, ascending.

    display: of :func:`display_times`.
    """
    first = display[0]
    return sorted(
        (time, number)
        for number, (time, label) in enumerate(zip(display, labels, strict=True))
        if label.is_shown and time >= first
    )


def display_times(labels: Sequence[Label], is_counted: bool) -> list[int]:
    """Return the display time of every packet's frame, in ticks."""
    if is_counted:
        return sorted(label.dts or 0 for label in labels)
    return [(label.dts or 0) if label.pts is None else label.pts for label in labels]


def last_frame(labels: Sequence[Label], display: Sequence[int]) -> tuple[int, int]:
    """Return when the last frame is displayed, and for how long (0 if unknown), in ticks.

    display: of :func:`display_times`.
    """
    last = max(range(len(display)), key=display.__getitem__)
    time, label = display[last], labels[last]
    # In MP4 a packet's duration is the step to the next one. Of a frame that is displayed after the
    # next ones, it may be a pause before them: the gap before the frame tells better.
    following = labels[last + 1].dts if last + 1 < len(labels) else None
    if following is not None and label.dts is not None:
        is_step = following - label.dts == label.duration
        before = max((each for each in display if each < time), default=None)
        if is_step and before is not None and label.duration > _MOST_UNEVEN * (time - before):
            return time, time - before
    return time, label.duration


def to_ticks(seconds: float, time_base: Fraction) -> float:
    """Return the first tick at or after a time; a time computed from a tick gives that tick."""
    ticks = seconds / float(time_base)
    rounding = max(1e-6, abs(ticks) * _MOST_ROUNDED)
    return ticks if math.isinf(ticks) else math.ceil(ticks - rounding)


def tick_until(seconds: float, time_base: Fraction) -> float:
    """Return the last tick at or before a time; likewise."""
    return -to_ticks(-seconds, time_base)
