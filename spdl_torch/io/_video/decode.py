"""Decode the frames that are wanted, and as few others as possible."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

from spdl_torch.errors import DecodeError

from .opening import decode_errors

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from av.video.codeccontext import VideoCodecContext
    from av.video.frame import VideoFrame

    from .._config import DecodeConfig
    from .packets import VideoPackets

__all__ = ["decode_wanted"]

_KNOWS_NONREF = frozenset({"h264", "mpeg1video", "mpeg2video", "mpeg4"})
"""Codecs in which a frame marked as a non-reference is a reference for no other frame at all. In
HEVC it may be one for a higher temporal layer."""


def decode_wanted(
    packets: VideoPackets,
    wanted: Sequence[int],
    num_threads: int = 1,
    config: DecodeConfig | None = None,
) -> Generator[VideoFrame]:
    """The frames displayed at the times ``wanted`` (ticks, ascending), in that order.

    Frames that did not come out are missing: some codecs have packets that are not displayed.
    Close the iterator, or run it to its end.

    Raises: DecodeError: the data is damaged where it matters; ValueError: FFmpeg does not know
        what ``config`` asks for.
    """
    # Which frames a configured decoder leaves out is for the configuration to say.
    timed = partial(_decode_timed, may_skip=config is None)
    decode = timed if packets.is_timed else _decode_counted
    context = packets.take_context(num_threads, config)
    try:
        with decode_errors(packets.source):
            for start, stop, times in _runs(packets, wanted):
                yield from _undamaged(decode(packets, context, start, stop, times), times, packets)
                context.flush_buffers()
    finally:
        context.skip_frame = "DEFAULT"
        packets.give_back(context, config)


def _runs(
    packets: VideoPackets, wanted: Sequence[int]
) -> Iterator[tuple[int, int, frozenset[int]]]:
    """The ranges of packets to decode, each from a keyframe on, and what is wanted of them."""
    keys = [k for k, packet in enumerate(packets.packets) if packet.is_keyframe]
    if not packets.is_timed and not packets.codec.counts_after_seek:
        keys = []
    if not keys or keys[0] != 0:
        keys.insert(0, 0)
    display = packets.display
    remaining = frozenset(wanted)
    needed: list[tuple[int, int]] = []
    for start, stop in pairwise([*keys, len(display)]):
        times = [time for time in display[start:stop] if time in remaining]
        if not times:
            continue
        first_sure = start if packets.is_timed else start + packets.codec.num_unsure
        # Frames displayed before their keyframe may refer to those before it.
        if needed and (needed[-1][1] == start):
            start = needed.pop()[0]
        elif start > 0 and (first_sure >= stop or min(times) < display[first_sure]):
            start = keys[keys.index(start) - 1]
        needed.append((start, stop))
    for start, stop in needed:
        yield start, stop, remaining.intersection(display[start:stop])


def _decode_timed(
    packets: VideoPackets,
    context: VideoCodecContext,
    start: int,
    stop: int,
    wanted: frozenset[int],
    *,
    may_skip: bool,
) -> Iterator[VideoFrame]:
    """Yield all decoded frames, each with the time of its packet."""
    display = packets.display
    last = max(k for k in range(start, stop) if display[k] in wanted)
    skips = may_skip and context.thread_count == 1 and packets.codec.name in _KNOWS_NONREF
    for k in range(start, last + 1):
        if skips:
            context.skip_frame = "DEFAULT" if display[k] in wanted else "NONREF"
        yield from context.decode(packets.packets[k])
    yield from context.decode(None)


def _decode_counted(
    packets: VideoPackets,
    context: VideoCodecContext,
    start: int,
    stop: int,
    wanted: frozenset[int],
) -> Iterator[VideoFrame]:
    """Yield all decoded frames, numbered in their order."""
    latest = max(wanted)
    place: int | None = None
    for k, packet in enumerate([*packets.packets[start:stop], None], start):
        for frame in context.decode(packet):
            if place is None:
                # Frames before the keyframe in the order of display have been left out.
                place = k - 1 if packets.codec.has_delay_of_one and packet is not None else start
            if place >= stop:
                return
            frame.pts = packets.display[place]
            yield frame
            if frame.pts >= latest:
                return
            place += 1


def _undamaged(
    frames: Iterator[VideoFrame], wanted: frozenset[int], packets: VideoPackets
) -> Iterator[VideoFrame]:
    """Yield the wanted frames; damage lasts until the next keyframe."""
    is_damaged = False
    time_base = packets.time_base
    for frame in frames:
        is_damaged = frame.is_corrupt or (is_damaged and not frame.key_frame)
        if frame.pts not in wanted:
            continue
        frame.time_base = time_base  # those that come out last have none
        if is_damaged:
            at = float(frame.pts * time_base)
            raise DecodeError(f"{packets.source}: damaged before or in the frame at {at:.3f} s.")
        yield frame
