"""The parts of a video that a clip needs: the facts, the spans to read, the frames on display."""

from __future__ import annotations

import math
from bisect import bisect_right
from fractions import Fraction
from itertools import pairwise
from typing import TYPE_CHECKING

from spdl_torch.errors import DecodeError

from .codec import rate_of
from .entry import is_checked
from .packets import UnsureError, display_times, last_frame, shown_frames, tick_until
from .samplers import VideoInfo

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from .codec import VideoCodec
    from .incoming import Incoming
    from .packets import VideoPackets
    from .reading import PacketReader

_SECONDS_TO_READ_ON = 5.0
"""Seek over longer gaps between two moments; reading on over shorter ones costs less."""

_LEAST_DIFFERENCE = 0.01
"""Two statements of a frame rate that differ by less are of a constant one."""

_MOST_UNEVEN = 1.5
"""A step from packet to packet of more than so many others is not their rounding."""

_STEPS_TO_SEE = 128
"""The most steps to look at before a rate is taken for constant; a microsecond each."""

_LEAST_LACKING = 0.25
"""Seconds without a frame before the stated end, after which a file is taken for cut off."""

_LEAST_SECONDS = 1e-3
"""The duration of a frame of which nothing else is known."""


def facts_of(reader: PacketReader, *, keeps_all: bool) -> tuple[VideoInfo, bool]:
    """Return the facts about a video, before anything of it was read; and whether the reader can go
    on, or another one is needed.

    They are the container's statements where it lists its packets. Where it does not, these are
    guesses, and all packets are looked at.

    keeps_all: as in ``PacketReader.survey``.
    Raises: DecodeError: no frame in it; UnsureError: its packets do not tell when their frames are
        displayed, so that all of it is to be decoded.
    """
    stated = _stated(reader)
    if stated is not None:
        return stated, True
    labels, are_kept = reader.survey(keeps_all=keeps_all)
    incoming = reader.incoming
    name, codec, is_counted = incoming.name, incoming.codec, incoming.layout.is_counted
    first = next((k for k, label in enumerate(labels) if label.is_entry), None)
    doubt = incoming.doubt
    if labels and (first is None or (first and is_counted)) and is_checked(codec.name):
        doubt = doubt or "it begins with frames that refer to others before"
    labels = labels[first or 0 :]  # what comes before is not decoded
    display = display_times(labels, is_counted)
    frames = labels and shown_frames(labels, display)
    if not frames:
        raise DecodeError(f"{name}: no frame in it.")
    if not is_counted and any(labels[number].pts is None for _, number in frames):
        doubt = doubt or "it has packets without a time"
    if codec.name == "vvc" and min(display) < display[0]:
        doubt = doubt or "it begins with a frame that is displayed after others"
    if doubt is not None:
        raise UnsureError(f"{name}: {doubt}.")
    times = [time for time, _ in frames]
    return _counted(name, codec, times, last_frame(labels, display)[1]), are_kept


def facts_of_packets(packets: VideoPackets) -> VideoInfo:
    """Return the facts about a video of which all packets are there."""
    if not packets.times:
        raise DecodeError(f"{packets.source}: no frame in it.")
    return _counted(packets.source, packets.codec, packets.times, packets.last_ticks)


def _stated(reader: PacketReader) -> VideoInfo | None:
    """Return what the container says, if it lists its packets and leaves nothing out."""
    incoming, start = reader.incoming, reader.starts_at
    if not incoming.layout.has_list:
        return None
    stream = incoming.stream
    rate = rate_of(stream)
    if start is None or not rate:
        return None
    tick = float(stream.time_base or 0)
    # Matroska's with another start is a duration in some files, and the end in others.
    is_either = start != 0 and "matroska" in incoming.container.format.name
    seconds = 0.0 if is_either else float(stream.duration or 0) * tick
    is_sum = incoming.codec.reorder_depth > 0 and _is_uneven(incoming, rate)
    if not seconds and start == 0:
        seconds = _tagged_seconds(stream.metadata.get("DURATION", ""))
        if not seconds and len(incoming.container.streams) == 1:
            seconds = (incoming.container.duration or 0) / 1e6
    elif is_sum or not seconds:
        stated = round(seconds / tick)
        seconds = _ticks_by_packets(reader, start, stated, 1 / float(rate) / tick) * tick
    if not seconds > 0:
        return None
    per_second = float(rate)
    if is_sum and stream.frames:
        per_second = stream.frames / seconds
    count = round(seconds * per_second)
    if stream.frames:  # with an edit list not all of them are displayed
        count = min(count, stream.frames)
    return _info(incoming.name, incoming.codec, start * tick, seconds, per_second, count)


def _is_uneven(incoming: Incoming, rate: Fraction) -> bool:
    """Return whether the container states two rates, or MP4 lists packets in uneven steps."""
    stream = incoming.stream
    if abs((stream.guessed_rate or rate) / rate - 1) > _LEAST_DIFFERENCE:
        return True
    if "mp4" not in incoming.container.format.name:
        return False
    listed = stream.index_entries
    # Some of them: a film has hundreds of thousands.
    some = range(0, len(listed) - 1, 1 + len(listed) // _STEPS_TO_SEE)
    steps = [listed[k + 1].timestamp - listed[k].timestamp for k in some]
    return max(steps, default=0) > _MOST_UNEVEN * min(steps, default=0)


def _ticks_by_packets(reader: PacketReader, start: int, stated: int, usual: float) -> int:
    """Return the duration by the last packets, in ticks; 0 where these are not to be had.

    What the container states stands if the last frame is on display then, or the file is cut off.
    In MP4 it is the sum of the steps from packet to packet. Where frames are reordered, the pauses
    before the first frames are in that in place of those before the last.

    start, stated, usual: when the first frame is displayed, the container's duration, 0 if unknown,
        and how long a frame is displayed on average, in ticks.
    """
    found = reader.find_end()
    if found is None:
        return stated if reader.is_cut_off else 0
    last, end = found
    is_sound = last < start + stated <= max(end, last + usual)
    return stated if is_sound else end - start


def _tagged_seconds(duration: str) -> float:
    """Return the seconds of Matroska's tag for a stream, such as 00:00:02.040000000; 0 for another
    text."""
    try:
        hours, minutes, seconds = map(float, duration.split(":"))
    except ValueError:
        return 0.0
    return 3600 * hours + 60 * minutes + seconds


def _counted(name: str, codec: VideoCodec, times: Sequence[int], last: int) -> VideoInfo:
    """Return the facts that the display times of all frames tell.

    last: the duration of the last one, in ticks; 0 if unknown.
    """
    tick, gaps = float(Fraction(*codec.time_base)), len(times) - 1
    span = times[-1] - times[0]
    seconds = (span + (last or span / max(1, gaps))) * tick
    rate = gaps / (span * tick) if span > 0 else len(times) / max(seconds, _LEAST_SECONDS)
    return _info(name, codec, times[0] * tick, seconds, rate, len(times))


def _info(
    name: str, codec: VideoCodec, start: float, seconds: float, rate: float, count: int
) -> VideoInfo:
    return VideoInfo(
        source=name,
        codec=codec.name,
        start_seconds=start,
        duration_seconds=seconds,
        frame_rate=rate,
        num_frames=count,
        width=codec.width,
        height=codec.height,
    )


def moments_of(sampled: Sequence[float] | Tensor) -> list[float]:
    """Return the moments of a sampler. Raises: ValueError: none, or one that is not finite."""
    moments = [float(moment) for moment in sampled]
    if not moments or not all(map(math.isfinite, moments)):
        raise ValueError(f"a sampler must return at least one finite moment, got {moments}.")
    return moments


def spans_of(moments: Sequence[float]) -> list[tuple[float, float]]:
    """Return the spans of time to read, ascending."""
    ordered = sorted(moments)
    gaps = [k + 1 for k, (a, b) in enumerate(pairwise(ordered)) if b - a > _SECONDS_TO_READ_ON]
    return [(ordered[a], ordered[b - 1]) for a, b in pairwise([0, *gaps, len(ordered)])]


def on_display(packets: VideoPackets, moments: Sequence[float], info: VideoInfo) -> list[int]:
    """Return the place of each moment's frame among the packets' frames.

    Raises: DecodeError: there are none, or times do not tell them apart.
    """
    times = packets.times
    if not times:
        raise DecodeError(f"{packets.source}: no frame in it.")
    packets.check_order()
    tick = float(packets.time_base)
    stated, end = info.start_seconds + info.duration_seconds, packets.end_seconds
    if end is None:
        end = max(stated, times[-1] * tick)
    allowed = end + max(_LEAST_LACKING, 1.5 / info.frame_rate)
    wanted = []
    for moment in moments:
        if moment > allowed:
            cut = f": it is cut off, and states {stated:g} s" if stated > allowed else ""
            raise DecodeError(
                f"{packets.source}: no frame at {moment:g} s, the video ends at {end:g} s{cut}."
            )
        place = bisect_right(times, tick_until(moment, packets.time_base)) - 1
        wanted.append(max(0, place))
    return wanted
