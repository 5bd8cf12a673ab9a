"""The parts of a video that a clip needs: the facts, the spans to read, the frames on display."""

from __future__ import annotations

import math
from bisect import bisect_right
from itertools import pairwise
from typing import TYPE_CHECKING

from spdl_torch.errors import DecodeError

from .codec import rate_of
from .demux import read_spans
from .samplers import VideoInfo

if TYPE_CHECKING:
    from collections.abc import Sequence

    from av.container import InputContainer
    from av.video.stream import VideoStream
    from torch import Tensor

    from .packets import VideoPackets

_SECONDS_TO_READ_ON = 5.0
"""Seek over longer gaps between two moments; reading on over shorter ones costs less."""


def measure(
    container: InputContainer, stream: VideoStream, name: str
) -> tuple[VideoInfo, VideoPackets | None]:
    """Return the facts about a video; and all its packets, where only reading them shows these."""
    time_base = float(stream.time_base or 0)
    rate = float(rate_of(stream) or 0)
    start = float(stream.start_time or 0) * time_base
    seconds = 0.0
    if stream.duration:
        seconds = stream.duration * time_base
    elif container.duration:
        seconds = container.duration / 1e6
    packets = None
    if not seconds > 0 or not rate > 0:
        packets = read_spans(container, stream, [(-math.inf, math.inf)], name)
        if not packets.times:
            raise DecodeError(f"{name}: no frame in it.")
        start, seconds = packets.get_timestamps()[0], packets.duration
        rate = rate or len(packets) / max(seconds, 1e-3)
    info = VideoInfo(
        source=name,
        codec=stream.codec_context.name,
        start_seconds=start,
        duration_seconds=seconds,
        frame_rate=rate,
        num_frames=stream.frames or (round(seconds * rate) if packets is None else len(packets)),
        width=stream.width,
        height=stream.height,
    )
    return info, packets


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
    end = max(info.start_seconds + info.duration_seconds, times[-1] * tick)
    wanted = []
    for moment in moments:
        if moment > end + 1 / info.frame_rate:
            raise DecodeError(
                f"{packets.source}: no frame at {moment:g} s, the video ends at {end:g} s."
            )
        place = bisect_right(times, math.floor(moment / tick + 1e-6)) - 1
        wanted.append(max(0, place))
    return wanted
