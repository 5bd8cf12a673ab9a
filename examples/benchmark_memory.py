"""What loading needs in memory: threads against worker processes, forked and spawned.

Two jobs, each in a fresh process that is watched from outside, ten times a second and when the
last batch is in hand; the figure is the largest memory of the process and its workers together:

- photographs: 2000 images by ImageNet's recipe (benchmark_start.py) with 2 workers;
- objects: a dataset that holds 1e7 Python objects, a ``(path, label)`` each as image folders have
  them, read in shuffled order. Looking at an object writes its reference count, so a forked worker
  ends up with a copy of its own of every page that it has looked at. Not run with spawned workers,
  which get a copy of the whole dataset to begin with.

Pages that the processes share count once (proportional share; the libraries that all of them map
count as much as in the process that maps most), so neither other programs on the machine nor the
sharing between workers change what is counted (``spdl_torch.measuring.memory``).

Goals: photographs at most 1.0 of forked and 0.5 of spawned workers; objects at most 0.4 of forked.

    python examples/benchmark_memory.py [--data DIR] [--objects N] [--rounds N] [--json FILE]
        [--smoke]
"""

from __future__ import annotations

import os
import time
from functools import partial
from typing import TYPE_CHECKING

import torch.utils.data
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
from benchmark_start import FORKED, OURS, SPAWNED, WORKERS, make_loader

from spdl_torch.bench.images import as_it_is
from spdl_torch.bench.table_memory import Records

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

PHOTOGRAPHS = "photographs: "
OBJECTS = "objects: "
LOOKUPS = 4096
"""Objects in a batch; few enough for many batches, enough for the loaders' own cost to vanish."""
METRICS = (
    Metric(key="peak_mib", heading="peak MiB"),
    Metric(key="seconds", heading="the epoch, s", digits=1),
)


def main(options: argparse.Namespace) -> Report:
    """Measure both jobs, in fresh processes that take turns."""
    num_objects = options.objects or (100_000 if options.smoke else 10_000_000)
    num_images = 96 if options.smoke else 2000
    rows = [PHOTOGRAPHS + row for row in (OURS, FORKED, SPAWNED)]
    rows += [OBJECTS + row for row in (OURS, FORKED)]
    with photographs(options.data, 40 if options.smoke else 200) as folder:
        report = Report(
            title=f"Largest memory of the training process and its {WORKERS} workers",
            metrics=METRICS,
            settings=machine(
                files=len(jpegs(folder)),
                images=num_images,
                objects=num_objects,
                rounds=options.rounds,
            ),
        )

        def measure_one(row: str) -> dict[str, float]:
            answer = in_fresh_process(
                __file__,
                row=row,
                folder=str(folder),
                num_images=num_images,
                num_objects=num_objects,
                watch_memory=True,
            )
            peak = max(answer["peak_bytes"], answer["at_the_end_bytes"])
            return {"seconds": answer["seconds"], "peak_mib": peak / 2**20}

        interleaved(report, rows, options.rounds, measure_one)
    report.goals = [
        _goal(PHOTOGRAPHS, FORKED, 1.0),
        _goal(PHOTOGRAPHS, SPAWNED, 0.5),
        _goal(OBJECTS, FORKED, 0.4),
    ]
    return report


def _goal(job: str, peer: str, at_most: float) -> Goal:
    return Goal(metric="peak_mib", row=job + OURS, over=job + peer, at_most=at_most)


def measure(
    row: str, folder: str, num_images: int, num_objects: int, watch_memory: bool
) -> dict[str, float]:
    """One epoch; the parent looks at the memory meanwhile."""
    assert watch_memory, "the peak comes from the parent"
    job = PHOTOGRAPHS if row.startswith(PHOTOGRAPHS) else OBJECTS
    loader_name = row.removeprefix(job)
    if job == PHOTOGRAPHS:
        loader = make_loader(loader_name, folder, num_images)
    else:
        loader = _object_loader(loader_name, num_objects)
    from spdl_torch.measuring.memory import tree_bytes

    last, at_the_end = len(loader), 0.0
    start = time.perf_counter()
    for number, _ in enumerate(loader, 1):
        if number == last:  # workers that are processes still live, and have seen all they will
            seconds = time.perf_counter() - start
            at_the_end = tree_bytes(os.getpid()) or 0.0
    return {"seconds": seconds, "at_the_end_bytes": at_the_end}


class ShuffledBatches(torch.utils.data.Sampler):
    """Indices in random order, kept as one tensor, so that the sampler holds no objects."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[list[int]]:
        for indices in torch.randperm(self.count).split(LOOKUPS):
            yield indices.tolist()

    def __len__(self) -> int:
        return -(-self.count // LOOKUPS)


def _object_loader(row: str, count: int) -> torch.utils.data.DataLoader:
    loader: Callable[..., torch.utils.data.DataLoader] = torch.utils.data.DataLoader
    if row == OURS:
        import spdl_torch

        loader = spdl_torch.DataLoader
    else:
        loader = partial(loader, multiprocessing_context="fork")
    return loader(
        Records(count),
        batch_sampler=ShuffledBatches(count),
        num_workers=WORKERS,
        collate_fn=as_it_is,
    )


if __name__ == "__main__":
    parser = argument_parser(__doc__, rounds=3)
    parser.add_argument("--objects", type=int, metavar="N", help="default: 1e7")
    run_program(main, parser, child=measure)
