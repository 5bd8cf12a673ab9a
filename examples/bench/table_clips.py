"""``clips``: 16 frames spread over 2 seconds of a video, uint8 at 224 x 224, batches of 4."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from . import videos
from .loaders import Work, bare_threads, ours, spdl_batches, spdl_items, torch_loader
from .loading import measure_loader, samples_of
from .report import Goal
from .tables import LOADER_METRICS, Contender, Table

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from .tables import BenchOptions

_BATCH = 4
_PER_SECOND = 30
_READERS: dict[str, Callable[[videos.Request], Any]] = {
    "ours": videos.our_clip,
    "PyAV": videos.pyav_clip,
    "SPDL": videos.spdl_clip,
    "torchcodec": partial(videos.torchcodec_clip, mode="exact"),
    "torchcodec, approximate": partial(videos.torchcodec_clip, mode="approximate"),
}


class Clips:
    """The same clips for every library."""

    thread_safe = True

    def __init__(self, requests: list[videos.Request], library: str) -> None:
        self.requests = requests
        self.library = library

    def __len__(self) -> int:
        return len(self.requests)

    def __getitem__(self, index: int) -> Any:
        """Return uint8, shape (16, 224, 224, 3)."""
        return _READERS[self.library](self.requests[index])


def _prepare(options: BenchOptions, folder: Path) -> dict[str, Any]:
    return {
        **videos.videos(options, folder),
        "batch_size": 2 if options.smoke else _BATCH,
        "num_samples": 4 if options.smoke else samples_of(options, _PER_SECOND, _BATCH),
    }


def make_work(settings: dict[str, Any], num_samples: int, library: str) -> Work:
    """Return random clips of the videos, drawn by a seed."""
    requests = videos.clips_of(settings["folder"], num_samples)
    return Work(
        dataset=Clips(requests, library),
        num_samples=num_samples,
        batch_size=settings["batch_size"],
        num_workers=settings["num_workers"],
        size_of=_size_of,
    )


def _size_of(batch: Any) -> int:
    expected = (videos.FRAMES, videos.PIXELS, videos.PIXELS, 3)
    assert tuple(batch.shape[1:]) == expected, batch.shape
    return len(batch)


def measure(contender: Contender, settings: dict[str, Any]) -> dict[str, float]:
    """Measure one pass over the clips."""
    return measure_loader(contender, settings, make_work)


def _one(name: str, run: Callable[..., Any], library: str, *needs: str, **more: Any) -> Contender:
    more["decodes_with_spdl"] = library == "SPDL"
    return Contender(name, run, needs, {"library": library}, **more)


_goal = partial(Goal, "per_second", "ours, threads")
_APPROXIMATE = "torchcodec, approximate"
TABLES = (
    Table(
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
        measure=measure,
        peer="torch, PyAV",
        goals=(
            _goal("SPDL*", at_least=1.8),
            _goal("torch, torchcodec*", at_least=1.3),
            _goal("torch, PyAV"),
            _goal("bare threads"),
        ),
    ),
)
