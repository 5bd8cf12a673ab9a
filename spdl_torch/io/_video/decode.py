"""Decode the frames that are wanted, and as few others as possible."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from av.error import InvalidDataError

from spdl_torch.errors import DecodeError

from .entry import is_checked
from .opening import decode_errors
from .packets import UnsureError
from .sequence import frames_in_sequence
from .slowness import say_once

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from av.video.codeccontext import VideoCodecContext
    from av.video.frame import VideoFrame

    from .._config import DecodeConfig
    from .packets import VideoPackets

_KNOWS_NONREF = frozenset({"h264", "mpeg1video", "mpeg2video", "mpeg4"})
"""Codecs in which a frame marked as a non-reference is a reference for no other frame at all. In
HEVC it may be one for a higher temporal layer."""

_LEAVES_OUT_WHAT_LACKS = frozenset({"hevc", "vvc"})
"""Codecs whose packets say which frames before a keyframe's, in the order of display, lack what
they refer to. Their decoders leave these out; the others are whole."""

_SLOW_PACKETS = 1000
"""Decoding more before the first frame that is wanted is said."""


def decode_wanted(
    packets: VideoPackets,
    wanted: Sequence[int],
    num_threads: int = 1,
    config: DecodeConfig | None = None,
) -> Generator[VideoFrame]:
    """The frames of the window at the places ``wanted`` (ascending), in that order.

    Only a decoder with a configuration leaves frames out. Close the iterator, or run it to its end.

    Raises: DecodeError: the data is damaged where it matters; UnsureError: other frames came out
        than the packets said; ValueError: FFmpeg does not know what ``config`` asks for.
    """
    context = packets.decoder.take(num_threads, config)
    times = {packets.numbers[place]: packets.times[place] for place in wanted}
    left = iter(times)
    try:
        with decode_errors(packets.source):
            for number, frame in _undamaged(
                _decoded(packets, context, times, config), times, packets
            ):
                # A configured decoder may leave out frames; that is for the configuration to say.
                expected = next((n for n in left if config is None or n == number), None)
                if expected != number:
                    raise UnsureError(_other(packets, times, expected))
                yield frame
            missing = next(left, None)
            if missing is not None and config is None:
                raise UnsureError(_other(packets, times, missing))
    finally:
        context.skip_frame = "DEFAULT"
        packets.decoder.give_back(context, config)


def _other(packets: VideoPackets, times: dict[int, int], number: int | None) -> str:
    if number is None:
        return f"{packets.source}: its decoder gives frames twice."
    at = float(times[number] * packets.time_base)
    return (
        f"{packets.source}: the frame at {at:.3f} s does not come out of its decoder in its turn."
    )


def _decoded(
    packets: VideoPackets,
    context: VideoCodecContext,
    wanted: dict[int, int],
    config: DecodeConfig | None,
) -> Iterator[tuple[int | None, VideoFrame]]:
    """Yield the numbers and frames of all that is decoded for the wanted ones."""
    if packets.sequence is not None:
        latest = max(wanted, default=-1)
        for number, (frame, _) in enumerate(frames_in_sequence(packets, context)):
            yield number, frame
            if number == latest:
                return
        return
    for start, stop, numbers in _runs(packets, frozenset(wanted)):
        try:
            if packets.is_counted:
                yield from _decode_counted(packets, context, start, stop, max(numbers))
            else:
                yield from _decode_timed(packets, context, start, numbers, may_skip=config is None)
        except InvalidDataError as error:
            if packets.codec.name != "mjpeg":
                raise
            # A picture lower than the container says is half of an interlaced one for a decoder
            # that begins with it, and not for one that has seen a whole picture before.
            raise UnsureError(f"{packets.source}: {error.strerror}.") from error
        context.flush_buffers()


def _runs(
    packets: VideoPackets, wanted: frozenset[int]
) -> Iterator[tuple[int, int, frozenset[int]]]:
    """The ranges of packets to decode, each from an entry on, and what is wanted of them."""
    entries = [0]
    if packets.can_seek:
        entries += [k for k, label in enumerate(packets.labels) if label.is_entry and k]
    display = packets.display
    needed: list[tuple[int, int]] = []
    for start, stop in pairwise([*entries, len(display)]):
        numbers = wanted.intersection(range(start, stop))
        if not numbers:
            continue
        first_sure = start + packets.codec.num_unsure if packets.is_counted else start
        # Frames displayed before their entry may refer to those before it.
        if needed and needed[-1][1] == start:
            start = needed.pop()[0]
        elif start > 0 and (
            first_sure >= stop or min(display[n] for n in numbers) < display[first_sure]
        ):
            start = entries[entries.index(start) - 1]
        needed.append((start, stop))
    for start, stop in needed:
        numbers = wanted.intersection(range(start, stop))
        if not packets.is_counted and min(numbers) - start > _SLOW_PACKETS:
            say_once(
                packets.source,
                "there is no place near where decoding may begin with certainty, so that more than "
                f"{_SLOW_PACKETS} frames are decoded for nothing; encoding it anew, with more "
                "keyframes, is quicker in the long run: ffmpeg -i FILE FILE.mp4",
            )
        yield start, stop, numbers


def _decode_timed(
    packets: VideoPackets,
    context: VideoCodecContext,
    start: int,
    wanted: frozenset[int],
    *,
    may_skip: bool,
) -> Iterator[tuple[int | None, VideoFrame]]:
    """Yield all decoded frames, each with the number of its packet."""
    stop = max(wanted) + 1
    skips = may_skip and context.thread_count == 1 and packets.codec.name in _KNOWS_NONREF
    for number in range(start, stop):
        if skips:
            context.skip_frame = "DEFAULT" if number in wanted else "NONREF"
        for frame in context.decode(packets.packets[number]):
            yield frame.pts, frame
    for frame in context.decode(None):
        yield frame.pts, frame


def _decode_counted(
    packets: VideoPackets,
    context: VideoCodecContext,
    start: int,
    stop: int,
    latest: int,
) -> Iterator[tuple[int | None, VideoFrame]]:
    """Yield all decoded frames, numbered in their order."""
    place: int | None = None
    delayed = packets.codec.has_delay_of_one
    for k, packet in enumerate([*packets.packets[start:stop], None], start):
        frames = context.decode(packet)
        if delayed and place is not None and len(frames) != 1:
            raise UnsureError(f"{packets.source}: not each of its packets is one frame.")
        for frame in frames:
            if place is None:
                # Frames before the entry in the order of display have been left out.
                place = k - 1 if delayed and packet is not None else start
                if place < start:
                    raise UnsureError(f"{packets.source}: its frames come out without a delay.")
            if place >= stop:
                raise UnsureError(f"{packets.source}: it has more frames than packets.")
            yield place, frame
            if place >= latest and latest < stop - 1:
                return
            place += 1


def _undamaged(
    frames: Iterator[tuple[int | None, VideoFrame]], times: dict[int, int], packets: VideoPackets
) -> Iterator[tuple[int, VideoFrame]]:
    """Yield the wanted frames, each with its time; damage lasts until the next keyframe."""
    first, name = packets.labels[0], packets.codec.name
    # Frames before the first keyframe lack what they refer to. Most decoders leave them out. One
    # that is itself not displayed is not seen.
    is_damaged = first.is_shown and (
        name == "mpeg4"
        or (first.is_entry and is_checked(name) and name not in _LEAVES_OUT_WHAT_LACKS)
    )
    time_base = packets.time_base
    for number, frame in frames:
        is_corrupt = frame.is_corrupt or (frame.pts is not None and packets.is_corrupt(frame.pts))
        is_damaged = is_corrupt or (is_damaged and not frame.key_frame)
        if number is None or number not in times:
            continue
        frame.pts, frame.time_base = times[number], time_base
        if is_damaged:
            at = float(times[number] * time_base)
            raise DecodeError(f"{packets.source}: damaged before or in the frame at {at:.3f} s.")
        yield number, frame
