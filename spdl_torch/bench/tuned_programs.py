"""The programs of the table ``autotune``: pipelines and a DataLoader, threads given or tuned."""

from __future__ import annotations

import functools
import itertools
import random
import threading
import time
import warnings
import zlib
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from .images import PIXELS, jpegs, our_folder
from .videos import clips_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["MOST_THREADS", "REAL", "SYNTHETIC", "Counts", "Program", "program"]

MOST_THREADS = 12
_WARM_UP_SECONDS = 0.25
_NEVER = 10**12
_PHOTOGRAPHS = 512
"""Photographs in an epoch: long enough for a window, whatever the folder has."""

Counts = dict[str, int]
"""Threads by stage."""


class Program(Protocol):
    """A program that runs with given numbers of threads, or finds its own."""

    def grid(self, widths: tuple[int, ...]) -> list[Counts]:
        """Return every point within the bound on threads, one thread each first."""

    def rate(self, point: Counts, seconds: float) -> float:
        """Return the items a second with these threads."""

    def tuned(self, seconds: float, most_windows: int) -> tuple[Counts, int]:
        """Return what the tuner ends with, and the number of its windows."""


class Stages(NamedTuple):
    """A pipeline: its source, and the ops of its stages by name."""

    source: Any
    ops: dict[str, Callable[[Any], Any]]


def _waits(mean_seconds: float, spread: float = 0.4) -> Callable[[Any], Any]:
    """Return a stage like storage or a network: log-normal waits."""
    draw = random.Random(0)

    def wait(item: Any) -> Any:
        time.sleep(draw.lognormvariate(0, spread) * mean_seconds)
        return item

    return wait


def _at_most(connections: int, seconds: float) -> Callable[[Any], Any]:
    """Return a store that serves this many requests at once."""
    free = threading.Semaphore(connections)

    def wait(item: Any) -> Any:
        with free:
            time.sleep(seconds)
        return item

    return wait


def _holds_the_gil(steps: int) -> Callable[[Any], Any]:
    """Return a stage in pure Python."""

    def count(item: Any) -> Any:
        for _ in range(steps):
            pass
        return item

    return count


def _computes(size: int) -> Callable[[Any], Any]:
    """Return a stage of C code that releases the GIL."""
    data = random.Random(0).randbytes(size)

    def compress(item: Any) -> Any:
        zlib.compress(data, 6)
        return item

    return compress


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _demux(request: Any) -> Any:
    """Return the packets that 16 frames of two seconds need."""
    from spdl_torch.io import demux_video

    return request, demux_video(request.path, timestamp=(request.times[0], request.times[-1]))


def _decode_frames(pair: Any) -> Any:
    """Return the frames, uint8 of shape (16, 224, 224, 3)."""
    import numpy as np

    from spdl_torch.io import convert_frames, get_video_filter_desc, sample_decode_video, to_torch

    request, packets = pair
    places = np.searchsorted(packets.get_timestamps(), request.moments, side="right") - 1
    scale = get_video_filter_desc(scale_width=PIXELS, scale_height=PIXELS)
    frames = sample_decode_video(packets, places.tolist(), filter_desc=scale)
    return to_torch(convert_frames(frames))


def _synthetic() -> dict[str, dict[str, Callable[[Any], Any]]]:
    """Return stages that wait, compute or hold the GIL in known ways."""
    return {
        "log-normal waits": {"read": _waits(0.004), "decode": _waits(0.020)},
        "two slow stages": {"read": _waits(0.015), "decode": _waits(0.018)},
        "GIL-bound": {"read": _waits(0.002), "parse": _holds_the_gil(40_000)},
        "CPU-bound": {"read": _waits(0.002), "decode": _computes(200_000)},
        "short tasks": {"a": _holds_the_gil(20), "b": _holds_the_gil(20)},
        "limited store": {"read": _at_most(6, 0.010), "decode": _waits(0.002)},
    }


SYNTHETIC = tuple(_synthetic())
REAL = ("photographs, pipeline", "photographs, DataLoader", "clips, pipeline")


def program(name: str, photographs: str, videos: str) -> Program:
    """Return one of ``SYNTHETIC`` or ``REAL``, over these folders."""
    if name == "photographs, DataLoader":
        return LoaderProgram(photographs)
    if name == "clips, pipeline":
        ops = {"demux": _demux, "decode": _decode_frames}
        return PipelineProgram(Stages(itertools.cycle(clips_of(videos, 64)), ops))
    if name == "photographs, pipeline":
        from spdl_torch.io import load_image

        decode = functools.partial(load_image, width=PIXELS, height=PIXELS)
        ops = {"read": _read, "decode": decode}
        return PipelineProgram(Stages(itertools.cycle(jpegs(photographs)), ops))
    return PipelineProgram(Stages(range(_NEVER), _synthetic()[name]))


class PipelineProgram:
    """A pipeline whose concurrencies are given or tuned."""

    def __init__(self, stages: Stages) -> None:
        self.source, self.ops = stages

    def grid(self, widths: tuple[int, ...]) -> list[Counts]:
        """Return every combination for the stages, within the bound on threads."""
        points = itertools.product(widths, repeat=len(self.ops))
        return [
            dict(zip(self.ops, point, strict=True))
            for point in points
            if sum(point) <= MOST_THREADS
        ]

    def _builder(self) -> Any:
        """Return a new builder, for every run."""
        from spdl_torch.pipeline import PipelineBuilder

        builder: Any = PipelineBuilder().add_source(self.source)
        for name, op in self.ops.items():
            builder.pipe(op, name=name)
        return builder.add_sink()

    def rate(self, point: Counts, seconds: float) -> float:
        """Return the items a second with these threads."""
        from spdl_torch.autotune import PerfParams

        builder = PerfParams.manual(point).apply(self._builder())
        with builder.build().auto_stop() as items:
            return _rate_of(iter(items), seconds)

    def tuned(self, seconds: float, most_windows: int) -> tuple[Counts, int]:
        """Tune, starting from one thread per stage."""
        from spdl_torch.autotune import PerfParams

        params = PerfParams.auto(max_threads=MOST_THREADS, window_seconds=seconds, write=None)
        options: Any = params.build_options()
        state = options["tuner"].state
        with params.apply(self._builder()).build(**options).auto_stop() as items:
            for _ in items:
                tuner = state.tuner()
                if tuner.is_settled or tuner.num_windows >= most_windows:
                    break
        return {**dict.fromkeys(self.ops, 1), **state.found}, state.tuner().num_windows


class LoaderProgram:
    """A DataLoader over the photographs, whose workers are tuned."""

    def __init__(self, photographs: str) -> None:
        self.dataset = our_folder(photographs, _PHOTOGRAPHS, crop=True)
        self.loader: Any = None

    def grid(self, widths: tuple[int, ...]) -> list[Counts]:
        """Return the numbers of workers."""
        return [{"num_workers": width} for width in widths]

    def _batches(self, num_workers: int) -> Iterator[Any]:
        """Yield batches, epoch after epoch; the workers stay."""
        from spdl_torch import DataLoader

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="This DataLoader will create")
            self.loader = DataLoader(
                self.dataset, 8, shuffle=True, num_workers=num_workers, persistent_workers=True
            )
        while True:
            yield from self.loader

    def rate(self, point: Counts, seconds: float) -> float:
        """Return the batches a second with this many workers."""
        return _rate_of(self._batches(point["num_workers"]), 2 * seconds)

    def tuned(self, seconds: float, most_windows: int) -> tuple[Counts, int]:
        """Tune, starting from one worker."""
        from spdl_torch.autotune import PerfParams

        params = PerfParams.auto(max_threads=MOST_THREADS, window_seconds=seconds, write=None)
        options: Any = params.loader_options()
        for _ in self._batches(options["num_workers"]):
            tuner = self.loader.tuning_state().tuner()
            if tuner.is_settled or tuner.num_windows >= most_windows:
                break
        return {"num_workers": int(self.loader.num_workers)}, tuner.num_windows


def _rate_of(items: Iterator[Any], seconds: float) -> float:
    """Return the items a second, once the pipeline has filled."""
    begin = time.perf_counter() + _WARM_UP_SECONDS
    while time.perf_counter() < begin:
        next(items)
    started, count = time.perf_counter(), 0
    while (now := time.perf_counter()) < started + seconds:
        next(items)
        count += 1
    return count / (now - started)
