"""Samplers, which choose the moments of a clip by the facts about its video."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from ...checks import check_whole


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
