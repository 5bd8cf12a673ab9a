"""What it costs to be watched: statistics and the flight recorder on against off.

Shows, for one process at a time, with the two kinds of passes taking turns so that whatever the
machine does happens to both:

- photographs, read, decoded and resized one by one on two threads of the DataLoader: how much
  longer a pass takes with ``stats=True``, the default, than with ``stats=False``, in percent;
- pipelines whose stages do nothing, which nothing could be cheaper than: what an item costs more,
  in microseconds, with one stage of one thread and with three stages of four, and with three
  stages while ``tracing()`` records every item.

Prints medians and spread over the rounds, and whether the goals were reached: at most 1 % on
photographs, and 1.5 µs for an item in a stage that does nothing.

    python examples/benchmark_overhead.py [--data DIR] [--rounds N] [--json FILE] [--smoke]
"""

from __future__ import annotations

import tempfile
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
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
from torch.utils.data import Dataset

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

ROW = "ours, watched against not"
METRICS = (
    Metric(key="photographs_percent", heading="photographs, %", digits=2),
    Metric(key="one_stage_us", heading="1 stage x 1, µs/item", digits=2),
    Metric(key="three_stages_us", heading="3 stages x 4, µs/item", digits=2),
    Metric(key="three_stages_traced_us", heading="the same, tracing(), µs/item", digits=2),
)


def main(options: argparse.Namespace) -> Report:
    """Measure in as many processes as there are rounds."""
    passes, num_items = (1, 500) if options.smoke else (9, 20_000)
    num_images = 32 if options.smoke else 400
    with photographs(options.data, 16 if options.smoke else 200) as folder:
        report = Report(
            title="What it costs to be watched",
            metrics=METRICS,
            settings=machine(files=len(jpegs(folder)), passes=passes, rounds=options.rounds),
        )
        measure_one = partial(
            in_fresh_process,
            __file__,
            folder=str(folder),
            num_images=num_images,
            num_items=num_items,
            passes=passes,
        )
        interleaved(report, [ROW], options.rounds, lambda row: measure_one(row=row))
    report.goals = [
        Goal(metric="photographs_percent", row=ROW, at_most=1.0),
        Goal(metric="one_stage_us", row=ROW, at_most=1.5),
        Goal(metric="three_stages_us", row=ROW, at_most=3 * 1.5),
    ]
    return report


def measure(
    row: str, folder: str, num_images: int, num_items: int, passes: int
) -> dict[str, float]:
    """Passes with and without, by turns; medians of what comes of each pair."""
    torch.set_num_threads(1)
    files = jpegs(folder)
    paths = [files[index % len(files)] for index in range(num_images)]
    one = partial(trivial_pass, num_items, stages=1, concurrency=1)
    three = partial(trivial_pass, num_items, stages=3, concurrency=4)
    return {
        "photographs_percent": 100 * paired(partial(photograph_pass, paths), passes, relative=True),
        "one_stage_us": paired(one, passes) / num_items * 1e6,
        "three_stages_us": paired(three, passes) / num_items * 1e6,
        "three_stages_traced_us": paired(partial(three, traced=True), passes) / num_items * 1e6,
    }


def paired(run: Callable[..., float], passes: int, *, relative: bool = False) -> float:
    """How many seconds, or what share, a pass takes longer with statistics: the median."""
    run(stats=True)  # warm up
    longer = []
    for number in range(passes):
        first = number % 2 == 0  # neither is always the one that comes second
        seconds = {stats: run(stats=stats) for stats in (first, not first)}
        difference = seconds[True] - seconds[False]
        longer.append(difference / seconds[False] if relative else difference)
    return median(longer)


def photograph_pass(paths: Sequence[str], *, stats: bool) -> float:
    """Seconds of an epoch in which nobody trains, so that loading is all there is."""
    from spdl_torch import DataLoader

    loader = DataLoader(Photographs(paths), batch_size=32, num_workers=2, stats=stats)
    start = time.perf_counter()
    count = sum(len(batch) for batch in loader)
    seconds = time.perf_counter() - start
    assert count == len(paths), f"{count=}"
    return seconds


def trivial_pass(
    num_items: int, *, stages: int, concurrency: int, stats: bool, traced: bool = False
) -> float:
    """Seconds from the first item to the last."""
    from spdl_torch.observe import tracing
    from spdl_torch.pipeline import PipelineBuilder

    builder = PipelineBuilder().add_source(range(num_items + 1))
    for _ in range(stages):
        builder.pipe(abs, concurrency=concurrency)
    pipeline = builder.add_sink(64).build(stats=stats)
    with tempfile.TemporaryDirectory() as folder:
        record = traced and stats
        with tracing(Path(folder) / "run.json") if record else nullcontext(), pipeline.auto_stop():
            items = iter(pipeline)
            next(items)
            start = time.perf_counter()
            count = sum(1 for _ in items)
            seconds = time.perf_counter() - start
    assert count == num_items, f"{count=}"
    return seconds


class Photographs(Dataset[torch.Tensor]):
    """One sample a call: uint8, (3, 224, 224)."""

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        from spdl_torch.io import load_image

        return load_image(self.paths[index], width=224, height=224)


if __name__ == "__main__":
    run_program(main, argument_parser(__doc__, rounds=5), child=measure)
