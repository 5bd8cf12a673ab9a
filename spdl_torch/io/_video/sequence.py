"""The frames of a video as they come out of its decoder, from the first to the last packet."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from typing import TYPE_CHECKING

from .opening import decode_errors
from .slowness import say_once

if TYPE_CHECKING:
    from collections.abc import Iterator

    from av.video.codeccontext import VideoCodecContext
    from av.video.frame import VideoFrame

    from .packets import VideoPackets

_SLOW_PACKETS = 1000
"""Decoding more for nothing is said."""


def find_sequence(packets: VideoPackets) -> None:
    """Decode all packets of a video, and let them know its frames.

    Raises: DecodeError: the data is damaged so that the decoder stops.
    """
    if len(packets.packets) > _SLOW_PACKETS:
        say_once(
            packets.source,
            "which frame is displayed when shows only in decoding all of it from its beginning; "
            "encoding it anew is quicker in the long run: ffmpeg -i FILE FILE.mp4",
        )
    context = packets.decoder.take(1)
    origins: list[tuple[int | None, int]] = []
    try:
        with decode_errors(packets.source):
            for frame, fed in frames_in_sequence(packets, context):
                origins.append((frame.pts, fed))
    finally:
        packets.decoder.give_back(context)
    packets.set_sequence(
        _counted(packets, origins) if packets.is_counted else _timed(packets, origins)
    )


def frames_in_sequence(
    packets: VideoPackets, context: VideoCodecContext
) -> Iterator[tuple[VideoFrame, int]]:
    """Yield all frames that are to be displayed, each with the number of packets given before."""
    labels = packets.labels
    for fed, packet in enumerate([*packets.packets, None], 1):
        for frame in context.decode(packet):
            if frame.pts is None or labels[frame.pts].is_shown:
                yield frame, fed


def _counted(packets: VideoPackets, origins: list[tuple[int | None, int]]) -> list[int]:
    places = [fed - 2 for _, fed in origins]
    if packets.codec.has_delay_of_one and places[:1] >= [0] and _ascend(places):
        return [packets.display[place] for place in places]  # without a frame there is a gap
    return packets.display[: len(origins)]


def _ascend(numbers: list[int]) -> bool:
    return all(a < b for a, b in pairwise(numbers))


def _timed(packets: VideoPackets, origins: list[tuple[int | None, int]]) -> list[int]:
    """Return the times that the packets have; between these, evenly spaced ones. Where none has
    one, frames are counted."""
    times: list[int | None] = []
    for (before, _), (number, _) in pairwise([(None, 0), *origins]):
        known = None if number is None or number == before else packets.labels[number].pts
        times.append(known)
    places = [place for place, time in enumerate(times) if time is not None]
    step = _ticks_of_a_frame(packets)
    if not places:
        return [round(packets.display[0] + place * step) for place in range(len(times))]
    result: list[int] = []
    for place, time in enumerate(times):
        if time is None:
            later = next((known for known in places if known > place), None)
            if not result:
                assert later is not None, "guaranteed: some time is known, and none was before"
                time = round((times[later] or 0) - (later - place) * step)
            elif later is None or (times[later] or 0) <= result[-1]:
                time = round(result[-1] + step)
            else:
                gap = Fraction((times[later] or 0) - result[-1], later - place + 1)
                time = round(result[-1] + gap)
        result.append(time)
    return result


def _ticks_of_a_frame(packets: VideoPackets) -> Fraction:
    rate = Fraction(*packets.frame_rate)
    return 1 / (rate * packets.time_base) if rate else Fraction(packets.labels[0].duration or 1)
