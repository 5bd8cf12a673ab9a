"""Two ways from packets to frames, and the check whether the fast one went right.

Exact means: the frame and the time that a decode of all gives, from the first packet on.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from av.error import FFmpegError

from spdl_torch.errors import DecodeError

from .codec import MPEG, TELL_KEYFRAMES, VideoCodec, is_entry, is_hidden
from .opening import decode_errors
from .reading import UnsureError, Video, goes_back

if TYPE_CHECKING:
    from av.packet import Packet
    from av.video.codeccontext import VideoCodecContext
    from av.video.frame import VideoFrame

    from .packets import VideoPackets

_KNOWS_NONREF = MPEG | {"h264"}
"""Codecs in which a frame marked as a non-reference is a reference for no other frame at all. In
HEVC it may be one for a higher temporal layer."""

_MOST_WAITING = 32
"""The most frames that are kept until one has a time."""


def decode_wanted(
    packets: VideoPackets, wanted: Sequence[int] | None, num_threads: int = 1
) -> Generator[VideoFrame]:
    """The frames of the window at the places ``wanted`` (ascending), in that order; None: all.

    Each has its time as its pts. Close the iterator, or run it to its end.

    Raises: UnsureError: the fast way did not go right; DecodeError: the data is damaged where it
        matters; IndexError: there is no such place.
    """
    with packets.decoder(num_threads) as context, decode_errors(packets.source):
        way = _fast if packets.is_fast else _in_order
        yield from way(packets, context, wanted)


def _fast(
    packets: VideoPackets, context: VideoCodecContext, wanted: Sequence[int] | None
) -> Iterator[VideoFrame]:
    """Decode from the entries before the wanted frames, without the frames that nobody needs: each
    time the wanted frames must come after a keyframe, in their order, and all of them.

    Raises: UnsureError: the frames are not so.
    """
    shown = packets.shown
    wanted = range(len(shown)) if wanted is None else wanted
    if wanted and not 0 <= wanted[0] <= wanted[-1] < len(shown):
        raise IndexError(f"indices must be in [0, {len(shown)}), got {list(wanted)}.")
    error = UnsureError(f"{packets.source}: other frames come out than its packets promise.")
    skips = context.thread_count == 1 and packets.codec.name in _KNOWS_NONREF
    times = {shown[place][1]: shown[place][0] for place in wanted}
    left = iter([shown[place][0] for place in wanted])
    for start, numbers in _runs(packets, times):
        is_sure, missing = False, {times[number] for number in numbers}
        try:
            run = [*packets.packets[start : numbers[-1] + 1], None]
            for number, packet in enumerate(run, start):
                if packet is not None and packet.is_corrupt:
                    raise error
                if packet is not None and skips:
                    context.skip_frame = "DEFAULT" if number in times else "NONREF"
                for frame in context.decode(packet):
                    is_sure = is_sure or frame.key_frame
                    if frame.pts not in missing:
                        continue
                    if not is_sure or frame.pts != next(left, None) or frame.is_corrupt:
                        raise error
                    missing.remove(frame.pts)
                    frame.time_base = packets.time_base
                    yield frame
        except FFmpegError as damage:
            raise UnsureError(f"{packets.source}: {damage}.") from damage
        if missing:
            raise error
        context.flush_buffers()


def _runs(packets: VideoPackets, times: dict[int, int]) -> list[tuple[int, list[int]]]:
    """Return where to begin decoding, and the numbers of the packets that are wanted from there.

    times: of the wanted frames, by the packets with which they come out.
    """
    labels = packets.labels
    entries = [number for number, label in enumerate(labels) if label.is_entry]
    runs: list[tuple[int, list[int]]] = []
    for number in sorted(times):
        place = bisect_right(entries, number) - 1
        # Frames displayed before an entry may refer to those before it.
        while place > 0 and (labels[entries[place]].pts or 0) > times[number]:
            place -= 1
        start, numbers = entries[place], [number]
        if runs and start <= runs[-1][1][-1]:
            before, others = runs.pop()
            start, numbers = min(start, before), [*others, number]
        runs.append((start, numbers))
    return runs


def _in_order(
    packets: VideoPackets, context: VideoCodecContext, wanted: Sequence[int] | None
) -> Iterator[VideoFrame]:
    """Decode from the first packet on, until the last wanted frame has come; None: all."""
    left = itertools.count() if wanted is None else iter(wanted)
    place, count = next(left, None), 0
    for frame, is_damaged in frames_in_order(packets, context):
        if count == place:
            yield undamaged(frame, is_damaged, packets.source)
            place = next(left, None)
            if place is None:
                return
        count += 1
    if wanted is not None:
        raise IndexError(f"indices must be in [0, {count}), got {list(wanted)}.")


def frames_in_order(
    packets: VideoPackets, context: VideoCodecContext
) -> Iterator[tuple[VideoFrame, bool]]:
    """Yield the frames of the window as a decode of all gives them; whether each is damaged.

    Raises: DecodeError: the times of a window's frames go back.
    """
    low, high = packets.ticks_of_window
    frames = every_frame(packets, context)
    if packets.timestamp is not None:
        frames = ascending(frames, packets)
    for frame, is_damaged in frames:
        time = frame.pts or 0
        if time >= high:
            return
        if time >= low:
            yield frame, is_damaged


def every_frame(
    video: Video | VideoPackets, context: VideoCodecContext
) -> Iterator[tuple[VideoFrame, bool]]:
    """Decode a video from its first packet on; yield each frame, with its time in ticks as its pts,
    and whether it is damaged: that lasts until the next keyframe.

    Times that are missing are evenly spaced: back from the first one that is known, and on from
    each. Where none is, frames are counted from the first packet's time on.
    """
    packets = iter(video.packets)
    first = next(packets, None)
    if first is None:
        return
    step, base, since = video.codec.ticks_of_a_frame or Fraction(1), Fraction(first.dts or 0), 0
    frames = _untimed(first, packets, context, video)
    head: list[tuple[VideoFrame, bool]] = []
    for each in frames:
        head.append(each)
        if each[0].pts is not None or len(head) == _MOST_WAITING:
            base = base if each[0].pts is None else each[0].pts - (len(head) - 1) * step
            break
    for frame, is_damaged in itertools.chain(head, frames):
        if frame.pts is None:
            frame.pts = round(base + since * step)
        else:
            base, since = Fraction(frame.pts), 0
        since += 1
        frame.time_base = video.codec.tick
        yield frame, is_damaged


def _untimed(
    first: Packet[Any],
    others: Iterable[Packet[Any]],
    context: VideoCodecContext,
    video: Video | VideoPackets,
) -> Iterator[tuple[VideoFrame, bool]]:
    """Yield the same frames with the times that containers and counting give; None: no time."""
    is_damaged, damaged = _may_lack_references(first, video.codec), set()
    fed: deque[int] = deque()
    for packet in itertools.chain([first], others, [None]):
        if packet is not None:
            fed.append(packet.dts or 0)
            if packet.is_corrupt:
                damaged.add(packet.pts)
        for frame in context.decode(packet):
            is_corrupt = frame.is_corrupt or frame.pts in damaged
            is_damaged = is_corrupt or (is_damaged and not frame.key_frame)
            # The first frame on the screen has the first packet's time, and so on.
            if video.is_counted:
                frame.pts = fed.popleft() if fed else None
            yield frame, is_damaged


def _may_lack_references(first: Packet[Any], codec: VideoCodec) -> bool:
    """Return whether frames before the first keyframe may come out of the decoder, although they
    lack what they refer to. Those of HEVC are left out, or whole."""
    if first.is_discard or is_hidden(first, codec):
        return False
    is_told = codec.name in TELL_KEYFRAMES - {"hevc"} and is_entry(first, codec)
    return codec.name == "mpeg4" or is_told


def ascending(
    frames: Iterable[tuple[VideoFrame, bool]], video: Video | VideoPackets
) -> Iterator[tuple[VideoFrame, bool]]:
    """Yield the same, each after a look at the next ones: a decoder that has lost its way gives
    frames out of order. Raises: DecodeError: times go back, so that none means one frame."""
    last: int | None = None
    ahead: deque[tuple[VideoFrame, bool]] = deque()
    for frame, is_damaged in frames:
        if last is not None and frame.pts is not None and frame.pts < last:
            raise goes_back(video, last, frame.pts)
        last = frame.pts
        ahead.append((frame, is_damaged))
        if len(ahead) > max(1, video.codec.reorder_depth):
            yield ahead.popleft()
    yield from ahead


def undamaged(frame: VideoFrame, is_damaged: bool, name: str) -> VideoFrame:
    """Return a frame that is wanted. Raises: DecodeError: it is damaged."""
    if is_damaged:
        raise DecodeError(f"{name}: damaged before or in the frame at {frame.time:.3f} s.")
    return frame
