"""``clips``: 16 frames spread over 2 seconds of a video, uint8 at 224 x 224, batches of 4."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import av
import numpy as np
import torch
from _moving_noise import write_video

from spdl_torch.io import load_clip

from .loaders import Work, bare_threads, ours, spdl_batches, spdl_items, torch_loader
from .passes import measure_loader, samples_of
from .peers import imported
from .report import Goal
from .tables import LOADER_METRICS, Contender, Table

if TYPE_CHECKING:
    from collections.abc import Callable

    from .tables import BenchOptions

_BATCH = 4
_PER_SECOND = 30
_PIXELS = 224
_FRAMES = 16
_SECONDS = 2.0
_SUFFIXES = {".mkv", ".mov", ".mp4", ".webm"}
"""No AVI: it does not say when frames are displayed, and each package counts them differently."""


def _prepare(options: BenchOptions, folder: Path) -> dict[str, Any]:
    if options.data is None:
        write_video(folder / "moving.mp4", seconds=3 if options.smoke else 10)
    paths = _videos_in(options.data or folder)
    for path in paths:
        path.read_bytes()  # caches it
    return {
        "folder": str(options.data or folder),
        "files": len(paths),
        "batch_size": 2 if options.smoke else _BATCH,
        "num_samples": 4 if options.smoke else samples_of(options, _PER_SECOND, _BATCH),
    }


def _videos_in(folder: Path | str) -> list[Path]:
    """Return the videos in a folder and its subfolders, sorted.

    Raises: SystemExit: there are none.
    """
    found = sorted(p for p in Path(folder).rglob("*") if p.suffix.lower() in _SUFFIXES)
    if not found:
        raise SystemExit(f"--data: {folder} must hold videos, found none.")
    return found


class Request(NamedTuple):
    """One clip, as every row gets it."""

    path: str
    moments: list[float]
    """Seconds: each in the middle of the time for which a frame is displayed."""
    times: list[float]
    """The times at which the same frames begin to be displayed."""


def clips_of(folder: str, num_clips: int) -> list[Request]:
    """Return the same random clips for every row; whole videos where they are shorter."""
    rng = random.Random(0)
    facts = []
    for path in map(str, _videos_in(folder)):
        with av.open(path) as container:
            stream: Any = container.streams.video[0]
            times = sorted(p.pts for p in container.demux(stream) if p.pts is not None)
            facts.append((path, [float(time * stream.time_base) for time in times]))
    requests = []
    for number in range(num_clips):
        path, times = facts[number % len(facts)]
        step = (times[-1] - times[0]) / (len(times) - 1)
        span = min(len(times), round(_SECONDS / step))
        first = rng.randint(0, len(times) - span)
        begins = [times[first + (2 * k + 1) * span // (2 * _FRAMES)] for k in range(_FRAMES)]
        requests.append(Request(path, [t + step / 2 for t in begins], begins))
    return requests


def our_clip(request: Request) -> Any:
    """Return the clip by one call of ours."""
    moments = request.moments
    return load_clip(request.path, lambda info: moments, width=_PIXELS, height=_PIXELS).frames


def spdl_clip(request: Request) -> Any:
    """Return the clip by SPDL: a window's frames by their numbers; others are not decoded."""
    io = imported("spdl.io")
    # From before the first wanted frame to after the last.
    window = request.times[0] - 1e-3, request.times[-1] + 1e-3
    packets = io.demux_video(request.path, timestamp=window)
    times = np.asarray(packets.get_timestamps())
    indices = np.searchsorted(times, request.moments, side="right") - 1
    scale = io.get_video_filter_desc(
        scale_width=_PIXELS, scale_height=_PIXELS, scale_algo="bilinear", scale_mode=None
    )
    frames = io.sample_decode_video(packets, indices.tolist(), filter_desc=scale)
    return io.to_torch(io.convert_frames(frames))


def torchcodec_clip(request: Request, mode: str) -> Any:
    """Return the clip by torchcodec, with one FFmpeg thread."""
    resize = imported("torchcodec.transforms").Resize
    decoder = imported("torchcodec.decoders").VideoDecoder(
        request.path,
        dimension_order="NHWC",
        num_ffmpeg_threads=1,
        seek_mode=mode,
        transforms=[resize((_PIXELS, _PIXELS))],
    )
    return decoder.get_frames_played_at(request.moments).data


def pyav_clip(request: Request) -> Any:
    """Return the clip by PyAV from the keyframe on, resized by swscale: what a user would write."""
    frames = []
    with av.open(request.path) as container:
        stream: Any = container.streams.video[0]
        step = 2 * (request.moments[0] - request.times[0])
        container.seek(int(request.times[0] / stream.time_base), stream=stream)
        remaining = list(request.moments)
        for frame in container.decode(stream):
            while remaining and frame.time is not None and frame.time + step > remaining[0]:
                small = frame.reformat(_PIXELS, _PIXELS, "rgb24", interpolation="BILINEAR")
                frames.append(torch.from_numpy(small.to_ndarray()))
                remaining.pop(0)
            if not remaining:
                break
    return torch.stack(frames)


_READERS: dict[str, Callable[[Request], Any]] = {
    "ours": our_clip,
    "PyAV": pyav_clip,
    "SPDL": spdl_clip,
    "torchcodec": partial(torchcodec_clip, mode="exact"),
    "torchcodec, approximate": partial(torchcodec_clip, mode="approximate"),
}


class Clips:
    """The same clips for every library."""

    thread_safe = True

    def __init__(self, requests: list[Request], library: str) -> None:
        self.requests = requests
        self.library = library

    def __len__(self) -> int:
        return len(self.requests)

    def __getitem__(self, index: int) -> Any:
        """Return uint8, shape (16, 224, 224, 3)."""
        return _READERS[self.library](self.requests[index])


def make_work(settings: dict[str, Any], num_samples: int, library: str) -> Work:
    """Return random clips of the videos, drawn by a seed."""
    return Work(
        dataset=Clips(clips_of(settings["folder"], num_samples), library),
        num_samples=num_samples,
        batch_size=settings["batch_size"],
        num_workers=settings["num_workers"],
        size_of=_size_of,
    )


def _size_of(batch: Any) -> int:
    assert tuple(batch.shape[1:]) == (_FRAMES, _PIXELS, _PIXELS, 3), batch.shape
    return len(batch)


def _one(name: str, run: Callable[..., Any], library: str, *needs: str, **more: Any) -> Contender:
    more["decodes_with_spdl"] = library == "SPDL"
    return Contender(name, run, needs, {"library": library}, **more)


_goal = partial(Goal, "per_second", "ours, threads")
_APPROXIMATE = "torchcodec, approximate"
TABLE = Table(
    name="clips",
    title="16 frames out of 2 seconds of a video, at 224 x 224, through the whole loader",
    metrics=LOADER_METRICS,
    contenders=(
        _one("ours, threads", ours, "ours", smoke=True),
        _one("ours, process", partial(ours, isolation="process"), "ours"),
        _one("torch, our load_clip", torch_loader, "ours"),
        _one("torch, PyAV", torch_loader, "PyAV"),
        _one("torch, torchcodec", torch_loader, "torchcodec", "torchcodec"),
        _one(f"torch, {_APPROXIMATE}", torch_loader, _APPROXIMATE, "torchcodec"),
        _one("SPDL, items", spdl_items, "SPDL", "spdl"),
        _one("SPDL, batches", spdl_batches, "SPDL", "spdl"),
        _one("bare threads", bare_threads, "ours"),
    ),
    prepare=_prepare,
    measure=partial(measure_loader, make_work=make_work),
    peer="torch, PyAV",
    goals=(
        _goal("SPDL, items", at_least=1.8),
        _goal("SPDL, batches", at_least=1.8),
        _goal("torch, torchcodec", at_least=1.3),
        _goal(f"torch, {_APPROXIMATE}", at_least=1.3),
        _goal("torch, PyAV"),
        _goal("bare threads"),
    ),
)
