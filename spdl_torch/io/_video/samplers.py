"""The facts about a video, known before anything is decoded, and samplers, which choose the moments
of a clip by them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from ...checks import check_whole
from .codec import rate_of, tells_keyframes
from .packets import Label, last_duration
from .reading import Video, no_frame

_BEYOND = 10**12
"""A time after the end of any video, in ticks, with which FFmpeg still calculates."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoInfo:
    """The facts about a video, known before decoding.

    MP4, MOV, Matroska, WebM and AVI list their packets, and state the rest. What other containers
    state is a guess, so that their packets are all looked at.
    """

    source: str
    """The path, or ``<bytes>``."""
    codec: str
    """FFmpeg's name of the codec, such as ``h264``."""
    start_seconds: float
    """The display time of the first frame; mostly 0."""
    duration_seconds: float
    frame_rate: float
    """The average frames per second."""
    num_frames: int
    """The container's count, that of its packets, or an estimate by duration and frame rate."""
    width: int
    """The coded width in pixels, before a rotation that the container asks for."""
    height: int


ClipSampler: TypeAlias = Callable[[VideoInfo], Sequence[float] | Tensor]
"""A function that returns the wanted moments in seconds; see :func:`load_clip`."""


def uniform_frames(num_frames: int, window: tuple[float, float] | None = None) -> ClipSampler:
    """Return a sampler of the middles of ``num_frames`` equal parts of the window.

    window (0, 8), 4 frames -> 1, 3, 5, 7 s

    Args:
        num_frames: at least 1.
        window: start and end in seconds; None takes the whole video.
    """
    check_whole("uniform_frames", num_frames=num_frames)
    if window is not None and not window[0] < window[1]:
        raise ValueError(f"uniform_frames: window must be (start, end), got {window}.")
    return partial(_uniform, num_frames=num_frames, window=window)


def random_clip(num_frames: int, seconds: float) -> ClipSampler:
    """Return a sampler of the middles of ``num_frames`` equal parts of a random window.

    The window is ``seconds`` long, its start drawn from torch's global random generator; a shorter
    video is used whole.
    """
    check_whole("random_clip", num_frames=num_frames)
    if not seconds > 0:
        raise ValueError(f"random_clip: seconds must be > 0, got {seconds}.")
    return partial(_random, num_frames=num_frames, seconds=float(seconds))


def strided_frames(num_frames: int, stride: int, start: int | Literal["random"] = 0) -> ClipSampler:
    """Return a sampler of every ``stride``-th frame, counted at the average frame rate.

    start 10, stride 4, 3 frames -> frames 10, 14, 18

    If the video ends too early, its last frame is repeated.

    Args:
        num_frames: at least 1.
        stride: the distance in frames, at least 1.
        start: the number of the first frame, or "random": drawn from torch's global random
            generator so that the clip fits, 0 if it cannot.
    """
    check_whole("strided_frames", num_frames=num_frames, stride=stride)
    if start != "random" and start < 0:
        raise ValueError(f"strided_frames: start must be >= 0 or 'random', got {start}.")
    return partial(_strided, num_frames=num_frames, stride=stride, start=start)


def _uniform(
    info: VideoInfo, *, num_frames: int, window: tuple[float, float] | None
) -> list[float]:
    start, end = window or (info.start_seconds, info.start_seconds + info.duration_seconds)
    return [start + (k + 0.5) * (end - start) / num_frames for k in range(num_frames)]


def _random(info: VideoInfo, *, num_frames: int, seconds: float) -> list[float]:
    room = max(0.0, info.duration_seconds - seconds)
    start = info.start_seconds + room * torch.rand((), dtype=torch.float64, device="cpu").item()
    end = start + min(seconds, info.duration_seconds)
    return _uniform(info, num_frames=num_frames, window=(start, end))


def _strided(
    info: VideoInfo, *, num_frames: int, stride: int, start: int | Literal["random"]
) -> list[float]:
    last = max(0, info.num_frames - 1)
    if start == "random":
        room = max(0, last - (num_frames - 1) * stride)
        start = int(torch.randint(room + 1, (), device="cpu"))
    numbers = [min(start + k * stride, last) for k in range(num_frames)]
    # The middle of a frame's time: rounding cannot reach the next frame. A container may count more
    # frames than it displays, so the end of its time is the last frame, too.
    end = info.start_seconds + info.duration_seconds
    return [min(info.start_seconds + (n + 0.5) / info.frame_rate, end) for n in numbers]


def facts_of(video: Video) -> VideoInfo:
    """Return the facts about a video that was just opened.

    They are the container's statements where it lists its packets, and else those of its packets,
    all of which are read for that; of these the times are known, and not which of them the decoder
    makes a frame of.

    Raises: DecodeError: no frame in it, or its times go back.
    """
    return (_stated(video) if video.has_list else None) or _surveyed(video)


def _stated(video: Video) -> VideoInfo | None:
    """Return what the container says; None where it leaves something out."""
    stream, rate, tick = video.stream, rate_of(video.stream), float(video.codec.tick)
    first = Label.of(video.first, video.codec)
    time = first.dts if video.is_counted else first.pts
    start = time if first.is_shown else stream.start_time
    if start is None or time is None or not rate:
        return None
    # Matroska's with another start is a duration in some files, and the end in others.
    seconds = 0.0 if video.is_matroska and start else float(stream.duration or 0) * tick
    if video.is_matroska and not start and not seconds:
        seconds = _tagged_seconds(stream.metadata.get("DURATION", ""))
        if not seconds and len(video.container.streams) == 1:
            seconds = (video.container.duration or 0) / 1e6
    seconds = seconds or _seconds_by_packets(video, start)
    if not seconds > 0:
        return None
    count = round(seconds * rate)
    if stream.frames:  # with an edit list not all of them are displayed
        count = min(count, stream.frames)
    return _info(video, start * tick, seconds, float(rate), count)


def _seconds_by_packets(video: Video, start: int) -> float:
    """Return the duration by the last packets; 0 where these are not to be had.

    start: when the first frame is displayed, in ticks.
    """
    if not video.land(_BEYOND):
        return 0.0
    labels = [Label.of(packet, video.codec) for packet in video.packets]
    times = [label.pts for label in labels if label.is_shown and label.pts is not None]
    if not times:
        return 0.0
    last = last_duration(labels) or round(video.codec.ticks_of_a_frame)
    return float(max(times) + last - start) * float(video.codec.tick)


def _tagged_seconds(duration: str) -> float:
    """Return the seconds of Matroska's tag for a stream, such as 00:00:02.040000000; 0 for another
    text."""
    try:
        hours, minutes, seconds = map(float, duration.split(":"))
    except ValueError:
        return 0.0
    return 3600 * hours + 60 * minutes + seconds


def _surveyed(video: Video) -> VideoInfo:
    """Return the facts that all packets tell; those before the first keyframe are not decoded."""
    labels = [Label.of(packet, video.codec) for packet in video.ascending()]
    if not video.is_counted and tells_keyframes(video.codec):
        labels = labels[next((k for k, label in enumerate(labels) if label.is_entry), 0) :]
    shown = [label for label in labels if label.is_shown]
    if not shown:
        raise no_frame(video.source)
    times = [label.dts if video.is_counted else label.pts for label in shown]
    # What is displayed before the first keyframe refers to frames before it, which are not there.
    first = times[0]
    times = [time for time in times if time is None or first is None or time >= first]
    known = [time for time in times if time is not None] or [shown[0].dts or 0]
    step = float(video.codec.ticks_of_a_frame) or max(1, shown[0].duration)
    num_before = next((k for k, time in enumerate(times) if time is not None), 0)
    start, last, tick = min(known) - num_before * step, max(known), float(video.codec.tick)
    ticks = last - start + (last_duration(labels) or step)
    if len(known) < len(times):  # what has no time may come before and after the others
        ticks = len(times) * step
    elif last > start:
        step = (last - start) / (len(times) - 1)
    return _info(video, start * tick, ticks * tick, 1 / (step * tick), len(times))


def _info(video: Video, start: float, seconds: float, per_second: float, count: int) -> VideoInfo:
    return VideoInfo(
        source=video.source,
        codec=video.codec.name,
        start_seconds=start,
        duration_seconds=seconds,
        frame_rate=per_second,
        num_frames=count,
        width=video.codec.width,
        height=video.codec.height,
    )
