"""Read packets of a container from where decoding may begin with certainty."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Self

from spdl_torch.errors import DecodeError

from .entry import can_have_entries, is_entry
from .incoming import Incoming
from .opening import can_seek
from .packets import Label, display_times, last_frame, tick_until, to_ticks
from .stream_packets import displayed, identity_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from av.container import InputContainer
    from av.packet import Packet
    from av.video.stream import VideoStream

    from .codec import VideoCodec
    from .incoming import Layout

_FIRST_STEP_SECONDS = 0.5
"""The first distance to seek back for an entry; these are mostly 0.5 to 10 s apart."""

_BEYOND = 10**12
"""A time after the end of any video, in ticks, with which FFmpeg still calculates."""

_LATEST = 1 << 60
"""No video lasts so many ticks; FFmpeg's numbers end at eight times as many."""

_MOST_KEPT_BYTES = 1 << 26
"""A video of more, whose container does not list its packets, is read twice for a clip."""


@dataclass(frozen=True, slots=True)
class _Opening:
    """The first packet of a video."""

    identity: tuple[int | None, ...]
    time: int
    """When it is displayed, in ticks."""
    lowest: int
    """The lowest time that a seek to it may need."""
    is_timed: bool
    is_shown: bool

    @classmethod
    def of(cls, first: Packet[Any], layout: Layout, codec: VideoCodec) -> Self:
        time = displayed(first) or 0
        return cls(
            identity=identity_of(first),
            time=time,
            lowest=min(time, first.dts or 0),
            is_timed=layout.is_counted or first.pts is not None,
            is_shown=Label.of(first, codec).is_shown,
        )


class PacketReader:
    """Collects packets, each once.

    Seeks only where the container lists its packets (MP4 and MOV, Matroska and WebM, AVI) and the
    source can seek. All else is read from its beginning to its end, and only what is needed is
    kept: without a list, nothing but the end shows that no time comes twice, as in files that were
    glued together.
    """

    def __init__(self, container: InputContainer, stream: VideoStream, name: str) -> None:
        self.packets: list[Packet[Any]] = []
        self.incoming = Incoming(container, stream, name)
        self.is_whole = False
        """Whether all packets were kept, from the first to the last."""
        self.is_from_start = True
        self.is_cut_off = False
        """Whether ``find_end`` missed the last packet that the container lists."""
        self._opening: _Opening | None = None
        first, codec = self.incoming.first, self.incoming.codec
        if first is not None:
            self._opening = _Opening.of(first, self.incoming.layout, codec)
        self._time_base = Fraction(*codec.time_base)
        self._seen: set[tuple[int | None, ...] | None] = set()
        self._has_dropped = self._has_moved = False

    def read(self, start: float, end: float) -> None:
        """Add the packets that the frames from ``start`` to ``end`` need, in seconds."""
        layout = self.incoming.layout
        if not math.isinf(start):
            ticks = tick_until(start, self._time_base)
            if layout.is_listed:
                self._seek(ticks)
            elif not layout.is_counted:
                self._skim(ticks)
        for packet in self.incoming.until(to_ticks(end, self._time_base)):
            # The way from an entry far back may begin in the span before.
            identity = identity_of(packet) if layout.is_listed else None
            if identity is None or identity not in self._seen:
                self._seen.add(identity)
                self.packets.append(packet)
        self.is_whole = self.incoming.at_end and self.is_from_start and not self._has_dropped

    @property
    def starts_at(self) -> int | None:
        """The display time of the first frame, in ticks, by the first packet; by the container's
        word where that is not displayed. None where only all packets tell."""
        opening = self._opening
        if opening is None or not opening.is_timed or self.incoming.codec.name == "vvc":
            return None  # VVC's first frames may come behind a later one
        return opening.time if opening.is_shown else self.incoming.stream.start_time

    def find_end(self) -> tuple[int, int] | None:
        """Return when the last frame is displayed and when it ends, in ticks; None where that is
        not to be had by a seek, or the file is cut off."""
        if not self.incoming.layout.is_listed or not self.incoming.land(_BEYOND):
            return None
        self._has_moved = True
        packets = [(packet.pos, Label.of(packet, self.incoming.codec)) for packet in self.incoming]
        if "mp4" in self.incoming.container.format.name:  # others list other places
            last_place = self.incoming.stream.index_entries[-1].pos
            self.is_cut_off = not packets or packets[-1][0] != last_place
        labels = [label for _, label in packets if label.is_shown]
        if self.is_cut_off or not labels:
            return None
        rate = Fraction(*self.incoming.codec.frame_rate)
        step = round(1 / (rate * self._time_base)) if rate else 0
        last, duration = last_frame(labels, display_times(labels, is_counted=False))
        return last, last + (duration or step)

    def survey(self, *, keeps_all: bool) -> tuple[list[Label], bool]:
        """Read everything, before anything else was read.

        keeps_all: whether packets are kept however large they are.

        Returns: the labels of all packets; and whether the packets were kept, so that ``read`` goes
            on from the first of them. If not, a new reader of the same video is needed.
        """
        labels: list[Label] = []
        kept: list[Packet[Any]] = []
        for packet in self.incoming:
            labels.append(Label.of(packet, self.incoming.codec))
            if self.incoming.skip(packet) <= _MOST_KEPT_BYTES or keeps_all:
                kept.append(packet)
            else:
                kept.clear()
        self.check_times(labels)
        self.incoming.put_back_all(kept)
        return labels, len(kept) == len(labels)

    def check_times(self, labels: Sequence[Label]) -> None:
        """Raise a DecodeError if the times of an MXF stand behind its packets, out of reach: those
        that FFmpeg guesses without them are a frame late."""
        container = self.incoming.container
        lacks_times = any(label.pts is None for label in labels)
        if lacks_times and container.format.name == "mxf" and not can_seek(container):
            raise DecodeError(
                f"{self.incoming.name}: the times of its frames are in a table at its end, which a "
                "source that cannot seek does not reach first: pass the file's bytes, or its path."
            )

    def look_at_the_rest(self) -> None:
        """Read to the end of the video, where only that shows that no time comes twice."""
        if not self.incoming.rest_is_unknown:
            return
        if not self.incoming.layout.is_listed or self.incoming.land(_BEYOND):
            for packet in self.incoming:
                self.incoming.skip(packet)

    def _skim(self, start: float) -> None:
        """Read on from an entry that is displayed at ``start`` (in ticks) or before."""
        held: list[Packet[Any]] = []
        for packet in self.incoming:
            time = packet.pts
            if time is not None and time <= start and is_entry(packet, self.incoming.codec):
                for skipped in held:
                    self.incoming.skip(skipped)
                self._has_dropped = self._has_dropped or bool(held)
                self.is_from_start = self.is_from_start and not (held and not self.packets)
                held = []
            held.append(packet)
            if time is not None and time > start:
                break
        self.incoming.put_back(held)

    def _seek(self, start: float) -> None:
        """Continue from an entry that is displayed at ``start`` (in ticks) or before."""
        opening = self._opening
        assert opening is not None, "guaranteed by the layout: what is listed is there"
        if start <= opening.time and not self.packets:
            if self._has_moved:
                self._return_to(opening)
            return
        if not can_have_entries(self.incoming.codec):
            return  # what came beside the first packet, as a palette, does not come after a seek
        step = max(1, round(_FIRST_STEP_SECONDS / self._time_base))
        target = int(min(start, _LATEST))
        while target > opening.lowest:
            if not self.incoming.land(target):
                break
            reach = self.incoming.until(start, most_ahead=0)
            entry = next((each for each in reach if is_entry(each, self.incoming.codec)), None)
            time = None if entry is None else displayed(entry)
            if entry is not None and time is not None and time <= start - self._unsure_ticks(entry):
                self.incoming.put_back([entry])
                self.is_from_start = self.is_from_start and bool(self.packets)
                return
            # Containers seek by dts, and some to any packet. So the entry found may be displayed
            # too late, or none may come before ``start``: look further back, in growing steps.
            target, step = target - step, 2 * step
        self._return_to(opening)

    def _return_to(self, opening: _Opening) -> None:
        """Continue from the first packet, or doubt that these are all.

        FFmpeg does not find a first packet that the container does not mark as a keyframe, and
        lands on any other then, also where it says that it has failed.
        """
        landed = self.incoming.land(opening.lowest)
        first = next(self.incoming, None) if landed else None
        if first is None or identity_of(first) != opening.identity:
            self.incoming.doubt = self.incoming.doubt or "the way back to its start was not found"
            self._has_dropped = True
        if first is not None:
            self.incoming.put_back([first])

    def _unsure_ticks(self, entry: Packet[Any]) -> Fraction:
        codec = self.incoming.codec
        if entry.pts is not None:
            return Fraction(0)
        rate = Fraction(*codec.frame_rate) or Fraction(25)
        return codec.num_unsure / (rate * self._time_base)
