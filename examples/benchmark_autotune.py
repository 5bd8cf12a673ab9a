"""How near to the best does tuning while running come? Against a grid of fixed concurrencies.

Six pipelines whose stages wait, compute or hold the GIL in known ways, and three that decode:
photographs in a pipeline and in a DataLoader, and clips of videos. Of each, every point of the grid
runs for a while; then the tuner begins with one thread a stage and has 15 windows. Last, the best
point of the grid and what the tuner ended with run in turns, which gives the fraction.

    python examples/benchmark_autotune.py [--data DIR] [--videos DIR] [--rounds N] [--json FILE]
        [--only NAME] [--smoke]
"""

from __future__ import annotations

import functools
import itertools
import random
import threading
import time
import zlib
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from _bench import (
    Goal,
    Metric,
    Report,
    argument_parser,
    in_fresh_process,
    interleaved,
    jpegs,
    machine,
    photographs,
    run_program,
)

from spdl_torch.bench.videos import PIXELS, clips_of, videos

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Mapping

METRICS = (
    Metric(key="start", heading="one thread each, items/s"),
    Metric(key="grid", heading="best of the grid, items/s"),
    Metric(key="auto", heading="tuned, items/s"),
    Metric(key="fraction", heading="tuned / grid", digits=2),
    Metric(key="windows", heading="windows"),
)
MOST_THREADS = 12
WIDTHS = (1, 2, 3, 4, 6, 8, 12)
MOST_WINDOWS = 15
_WARM_UP_SECONDS = 0.25
_RANGES = 3
_NEVER = 10**12

Counts = dict[str, int]


class Workload(NamedTuple):
    """A pipeline: the ops of its stages by name."""

    source: Any
    stages: dict[str, Callable[[Any], Any]]


def waits(mean_seconds: float, spread: float = 0.4) -> Callable[[Any], Any]:
    """Storage or a network: log-normal waits."""
    draw = random.Random(0)

    def wait(item: Any) -> Any:
        time.sleep(draw.lognormvariate(0, spread) * mean_seconds)
        return item

    return wait


def at_most(connections: int, seconds: float) -> Callable[[Any], Any]:
    """A store that serves so many at once."""
    free = threading.Semaphore(connections)

    def wait(item: Any) -> Any:
        with free:
            time.sleep(seconds)
        return item

    return wait


def holds_the_gil(steps: int) -> Callable[[Any], Any]:
    """Pure Python."""

    def count(item: Any) -> Any:
        for _ in range(steps):
            pass
        return item

    return count


def computes(size: int) -> Callable[[Any], Any]:
    """C code that releases the GIL."""
    data = random.Random(0).randbytes(size)

    def compress(item: Any) -> Any:
        zlib.compress(data, 6)
        return item

    return compress


def read(path: str) -> bytes:
    """A file's bytes."""
    with open(path, "rb") as file:
        return file.read()


def demux(request: Any) -> Any:
    """The packets that 16 frames of two seconds need."""
    from spdl_torch.io import demux_video

    return request, demux_video(request.path, timestamp=(request.times[0], request.times[-1]))


def decode_frames(pair: Any) -> Any:
    """The frames, uint8 of shape (16, 224, 224, 3)."""
    import numpy as np

    from spdl_torch.io import convert_frames, get_video_filter_desc, sample_decode_video, to_torch

    request, packets = pair
    places = np.searchsorted(packets.get_timestamps(), request.moments, side="right") - 1
    scale = get_video_filter_desc(scale_width=PIXELS, scale_height=PIXELS)
    return to_torch(
        convert_frames(sample_decode_video(packets, places.tolist(), filter_desc=scale))
    )


def workload(name: str, data: str, clips: str) -> Workload:
    """One of the pipelines, by name."""
    if name == "clips, pipeline":
        return Workload(clips_of(clips, 64), {"demux": demux, "decode": decode_frames})
    if name == "photographs, pipeline":
        from spdl_torch.io import load_image

        decode = functools.partial(load_image, width=224, height=224)
        return Workload(jpegs(data), {"read": read, "decode": decode})
    return Workload(
        range(_NEVER),
        {
            "log-normal waits": {"read": waits(0.004), "decode": waits(0.020)},
            "two slow stages": {"read": waits(0.015), "decode": waits(0.018)},
            "GIL-bound": {"read": waits(0.002), "parse": holds_the_gil(40_000)},
            "CPU-bound": {"read": waits(0.002), "decode": computes(200_000)},
            "short tasks": {"a": holds_the_gil(20), "b": holds_the_gil(20)},
            "limited store": {"read": at_most(6, 0.010), "decode": waits(0.002)},
        }[name],
    )


SYNTHETIC = (
    *("log-normal waits", "two slow stages", "GIL-bound"),
    *("CPU-bound", "short tasks", "limited store"),
)
REAL = ("photographs, pipeline", "photographs, DataLoader", "clips, pipeline")


def main(options: argparse.Namespace) -> Report:
    """Measure every workload."""
    names = SYNTHETIC[:1] + REAL[1:2] if options.smoke else SYNTHETIC + REAL
    names = tuple(name for name in names if options.only is None or options.only in name)
    rows = {f"ours, {name}": name for name in names}
    seconds = 0.2 if options.smoke else 0.6
    report = Report(
        title="Tuning while running, against every point of a grid",
        metrics=METRICS,
        settings=machine(threads=MOST_THREADS, rounds=options.rounds, seconds=seconds),
    )
    num_photographs = 16 if options.smoke else 200
    with photographs(options.data, num_photographs) as folder, videos(options.videos) as clips:
        where = {"data": str(folder), "clips": str(clips)}
        measure_one = functools.partial(
            in_fresh_process, __file__, **where, seconds=seconds, smoke=options.smoke
        )
        interleaved(report, [*rows], options.rounds, lambda row: measure_one(name=rows[row]))
    for row in rows:
        report.goals.append(Goal(metric="fraction", row=row, at_least=0.95))
        report.goals.append(Goal(metric="windows", row=row, at_most=MOST_WINDOWS))
    return report


def measure(name: str, data: str, clips: str, seconds: float, smoke: bool) -> Mapping[str, float]:
    """The grid, then the tuner, then both in turns."""
    program: PipelineProgram | LoaderProgram
    if name.endswith("DataLoader"):
        program = LoaderProgram(data)
    else:
        program = PipelineProgram(workload(name, data, clips))
    points = program.grid(WIDTHS[:2] if smoke else WIDTHS)
    rates = [(program.rate(point, seconds), point) for point in points]
    best = max(rates, key=lambda each: each[0])[1]
    found, windows = program.tuned(seconds, 2 if smoke else MOST_WINDOWS)
    pairs = [(program.rate(best, seconds), program.rate(found, seconds)) for _ in range(_RANGES)]
    return {
        "start": rates[0][0],
        "grid": median(grid for grid, _ in pairs),
        "auto": median(auto for _, auto in pairs),
        "fraction": median(auto / grid for grid, auto in pairs),
        "windows": windows,
    }


class PipelineProgram:
    """A pipeline with concurrencies that are given or found."""

    def __init__(self, work: Workload) -> None:
        source, self.stages = work
        self.source = itertools.cycle(source) if isinstance(source, list) else source

    def grid(self, widths: tuple[int, ...]) -> list[Counts]:
        """Every point within the bound."""
        points = itertools.product(widths, repeat=len(self.stages))
        return [
            dict(zip(self.stages, point, strict=True))
            for point in points
            if sum(point) <= MOST_THREADS
        ]

    def builder(self) -> Any:
        """Anew for every run."""
        from spdl_torch.pipeline import PipelineBuilder

        builder = PipelineBuilder().add_source(self.source)
        for name, op in self.stages.items():
            builder.pipe(op, name=name)
        return builder.add_sink()

    def rate(self, point: Counts, seconds: float) -> float:
        """Items a second with these threads."""
        from spdl_torch.autotune import PerfParams

        builder = PerfParams.manual(point).apply(self.builder())
        with builder.build().auto_stop() as items:
            return rate_of(iter(items), seconds)

    def tuned(self, seconds: float, most_windows: int) -> tuple[Counts, int]:
        """What the tuner ends with, and after how many windows."""
        from spdl_torch.autotune import PerfParams

        params = PerfParams.auto(max_threads=MOST_THREADS, window_seconds=seconds, write=None)
        options = params.build_options()
        state = options["tuner"].state
        with params.apply(self.builder()).build(**options).auto_stop() as items:
            for _ in items:
                tuner = state.tuner()
                if tuner.is_settled or tuner.num_windows >= most_windows:
                    break
        return {**dict.fromkeys(self.stages, 1), **state.found}, state.tuner().num_windows


class LoaderProgram:
    """A DataLoader over the photographs."""

    def __init__(self, data: str) -> None:
        from torchvision import transforms

        from spdl_torch import ImageFolder

        crop = [transforms.RandomResizedCrop(224), transforms.PILToTensor()]
        self.dataset = ImageFolder(data, transforms.Compose(crop))
        self.loader: Any = None

    def grid(self, widths: tuple[int, ...]) -> list[Counts]:
        """Numbers of workers."""
        return [{"num_workers": width} for width in widths]

    def batches(self, num_workers: int) -> Iterator[Any]:
        """Epoch after epoch; the workers stay."""
        import warnings

        from spdl_torch import DataLoader

        warnings.filterwarnings("ignore", message="This DataLoader will create")
        self.loader = DataLoader(
            self.dataset, 8, shuffle=True, num_workers=num_workers, persistent_workers=True
        )
        while True:
            yield from self.loader

    def rate(self, point: Counts, seconds: float) -> float:
        """Batches a second with so many workers."""
        return rate_of(self.batches(point["num_workers"]), 2 * seconds)

    def tuned(self, seconds: float, most_windows: int) -> tuple[Counts, int]:
        """What the tuner ends with, and after how many windows."""
        from spdl_torch.autotune import PerfParams

        params = PerfParams.auto(max_threads=MOST_THREADS, window_seconds=seconds, write=None)
        for _ in self.batches(params.loader_options()["num_workers"]):
            tuner = self.loader.tuning_state().tuner()
            if tuner.is_settled or tuner.num_windows >= most_windows:
                break
        return {"num_workers": int(self.loader.num_workers)}, tuner.num_windows


def rate_of(items: Iterator[Any], seconds: float) -> float:
    """Items a second, once the pipeline has filled."""
    begin = time.perf_counter() + _WARM_UP_SECONDS
    while time.perf_counter() < begin:
        next(items)
    started, count = time.perf_counter(), 0
    while (now := time.perf_counter()) < started + seconds:
        next(items)
        count += 1
    return count / (now - started)


def parser() -> argparse.ArgumentParser:
    """Photographs and videos may be the user's own."""
    options = argument_parser(__doc__, rounds=1)
    options.add_argument(
        "--videos",
        type=Path,
        metavar="DIR",
        help="a folder of videos (default: one made for the occasion, removed at the end)",
    )
    options.add_argument("--only", metavar="NAME", help="the pipelines whose name has this in it")
    return options


if __name__ == "__main__":
    run_program(main, parser(), child=measure)
