"""Formats of arrays and pools of workers: loads a second and CPU time.

Every combination of

- format: ``torch`` (torch.save), ``npy``, ``npz`` (stored) and ``npz-compressed``;
- loader: numpy and ours (``spdl_torch.io.load_npy`` and ``load_npz``); torch.load for ``torch``;
- pool: threads or processes;
- number of workers.

One load is a smooth picture, uint8 (3, 640, 480), and its labels, uint8 (640, 480), from bytes
that every worker has in memory. A task is a batch of 16 loads, and its arrays go to the caller, as
in a data loader: by reference from threads, copied between processes from processes. The clock
starts when every worker has done a first task. The CPU time is that of all processes over the
pool's whole life.

Every combination is measured once a round, in reverse order every other round, so that a machine
that slows down slows all of them down. Prints the median of each over the rounds with the smallest
and the largest value; ``--csv`` writes them, for benchmark_numpy_plot.py to draw.

    python examples/benchmark_numpy.py [--workers N [N ...]] [--iterations N] [--rounds N]
        [--csv FILE] [--smoke]
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import csv
import functools
import io
import itertools
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import interpolate

from spdl_torch.autotune import Limits
from spdl_torch.io import load_npy, load_npz

Load = Callable[[bytes], Any]

BATCH = 16
"""Loads per task."""
POOLS = ("threads", "processes")
CASES = (
    *(("torch", "torch"), ("npy", "numpy"), ("npy", "ours"), ("npz", "numpy"), ("npz", "ours")),
    *(("npz-compressed", "numpy"), ("npz-compressed", "ours")),
)
METRICS = {"loads_per_second": "loads/s", "cpu_ms_per_load": "CPU ms/load"}
"""Name and heading."""
COLUMNS = ("pool", "format", "loader", "num_workers", "metric", "median", "smallest", "largest")


def parser() -> argparse.ArgumentParser:
    """Return a parser of the command line."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = options.add_argument
    most = min(2 * max(1, Limits.of_this_machine().num_cores), 32)
    workers = [n for n in (1, 2, 4, 8, 16, 32) if n <= most]
    help_workers = "default: powers of two up to twice the cores and to 32"
    add("--workers", type=int, nargs="+", metavar="N", default=workers, help=help_workers)
    help_loads = "loads of a combination a round (default: 1000), more if they take no 0.3 s"
    add("--iterations", type=int, default=1000, metavar="N", help=help_loads)
    add("--rounds", type=int, default=5, help="default: 5")
    add("--csv", type=Path, metavar="FILE", help="for the plot")
    add("--smoke", action="store_true", help="tiny amounts; figures mean nothing")
    return options


def main(options: argparse.Namespace) -> None:
    """Measure all combinations round after round, print the table and write the CSV."""
    if options.smoke:
        options.workers, options.rounds, options.iterations = [1], 1, BATCH
    seconds = 0.0 if options.smoke else 0.3
    combinations: list[tuple[str, str, str, int]] = [
        (pool, saved_as, library, count)
        for pool, (saved_as, library), count in itertools.product(
            POOLS, CASES, sorted(set(options.workers))
        )
    ]
    found = {each: {metric: list[float]() for metric in METRICS} for each in combinations}
    for number in range(options.rounds):
        for each in combinations if number % 2 == 0 else reversed(combinations):
            where = f"round {number + 1}/{options.rounds}"
            print(f"{where}: {name_of(each)}", file=sys.stderr, flush=True)
            for metric, value in measure(*each, options.iterations, seconds).items():
                found[each][metric].append(value)
    print("Loads of uint8 (3, 640, 480) and (640, 480) from bytes in memory")
    print(f"{'':<36}" + "".join(f"{heading:>36}" for heading in METRICS.values()))
    lines = []
    for each, figures in found.items():
        texts = []
        for metric, values in figures.items():
            numbers = statistics.median(values), min(values), max(values)
            lines.append((*each, metric, *numbers))
            middle, low, high = (f"{x:,.4g}" for x in numbers)
            texts.append(f"{f'{middle} ({low}..{high})':>36}")
        print(f"{name_of(each):<36}" + "".join(texts))
    if options.csv:
        with open(options.csv, "w", newline="") as file:
            csv.writer(file).writerows([COLUMNS, *lines])
        print(f"Wrote {options.csv}.")


def name_of(combination: tuple[str, str, str, int]) -> str:
    """Return the name of a row."""
    pool, saved_as, library, count = combination
    return f"{saved_as}, {library}, {count} {pool}"


def measure(
    pool: str, saved_as: str, library: str, num_workers: int, num_loads: int, seconds: float
) -> dict[str, float]:
    """Measure one repeat of one combination, in a pool of its own."""
    files = encoded(saved_as)
    cpu = tree_cpu_seconds()
    with make_pool(pool, num_workers, (saved_as, library, files)) as executor:
        # Twice as many tasks as there are workers, so that almost every worker has had one.
        num_first = run_tasks(executor, num_workers, 2 * num_workers)
        start = time.perf_counter()
        num_rest = run_tasks(executor, num_workers, -(-num_loads // BATCH), start + seconds)
        elapsed = time.perf_counter() - start
    cpu = tree_cpu_seconds() - cpu
    return {
        "loads_per_second": num_rest * BATCH / elapsed,
        "cpu_ms_per_load": cpu / ((num_first + num_rest) * BATCH) * 1e3,
    }


@functools.cache
def encoded(saved_as: str) -> list[bytes]:
    """Return the picture and its labels as files, the same ones in every repeat."""
    # Smooth, since random bytes cannot be compressed.
    rng = np.random.default_rng(0)
    grids = torch.from_numpy(np.stack([rng.integers(0, 256, (8, 6)) for _ in range(4)])).double()
    fields = interpolate(grids[None], (640, 480), mode="bilinear", align_corners=True)[0]
    arrays = {"image": fields[:3].byte().numpy(), "label": (fields[3] // 32).byte().numpy()}
    if saved_as == "npy":
        return [written(np.save, array) for array in arrays.values()]
    if saved_as == "torch":
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        return [written(lambda file: torch.save(tensors, file))]
    return [written(np.savez if saved_as == "npz" else np.savez_compressed, **arrays)]


def written(save: Callable[..., object], *arrays: Any, **named: Any) -> bytes:
    """Return what ``save`` writes."""
    file = io.BytesIO()
    save(file, *arrays, **named)
    return file.getvalue()


def tree_cpu_seconds() -> float:
    """Return the CPU seconds of this process and of those that it has joined (these to 10 ms)."""
    children = os.times()[2:4]
    return time.process_time() + sum(children)


def make_pool(
    pool: str, num_workers: int, case: tuple[str, str, list[bytes]]
) -> concurrent.futures.Executor:
    """Return workers that have the files and know how to load them."""
    if pool == "threads":
        return concurrent.futures.ThreadPoolExecutor(num_workers, "load", prepare, case)
    context = multiprocessing.get_context("fork" if hasattr(os, "fork") else "spawn")
    return concurrent.futures.ProcessPoolExecutor(num_workers, context, prepare, case)


def run_tasks(
    executor: concurrent.futures.Executor, num_workers: int, num_tasks: int, end: float = 0.0
) -> int:
    """Have the workers make batches, a few ahead of this thread, which drops each one.

    Returns: how many, which is more than ``num_tasks`` if those were done before ``end``.
    """
    pending: collections.deque[concurrent.futures.Future[Any]] = collections.deque()
    num_done = 0
    while num_done < num_tasks or time.perf_counter() < end:
        while len(pending) < 2 * num_workers:
            pending.append(executor.submit(load_batch))
        check(pending.popleft().result())
        num_done += 1
    for future in pending:
        check(future.result())
    return num_done + len(pending)


def check(batch: list[Any]) -> None:
    """Check that every array arrived."""
    shapes = {tuple(array.shape) for arrays in batch for array in arrays}
    assert shapes == {(3, 640, 480), (640, 480)}, shapes


_load: Callable[[], Any]
"""The function that the tasks of this process call; one combination is measured at a time."""


def prepare(saved_as: str, library: str, files: list[bytes]) -> None:
    """Set up a worker: the first call in it."""
    global _load
    torch.set_num_threads(1)
    functions: dict[str, tuple[Load, Load]] = {
        "ours": (load_npy, load_npz),
        "numpy": (numpy_load, numpy_load),
        "torch": (torch_load, torch_load),
    }
    _load = loader(files, *functions[library])


def load_batch() -> list[Any]:
    """Load a batch: a task."""
    return [_load() for _ in range(BATCH)]


def numpy_load(content: bytes) -> Any:
    """Return the array, or the archive, in a file's bytes."""
    return np.load(io.BytesIO(content))


def torch_load(content: bytes) -> Any:
    """Return the tensors in a file's bytes, by name."""
    return torch.load(io.BytesIO(content))


def loader(files: list[bytes], load_npy: Load, load_npz: Load) -> Callable[[], Any]:
    """Return a function that loads a picture and its labels, from a file each or one of both."""
    if len(files) == 2:
        first, second = files  # no loop, which would be a part of what the fastest ones take
        return lambda: (load_npy(first), load_npy(second))

    def load() -> tuple[Any, Any]:
        archive = load_npz(files[0])
        return archive["image"], archive["label"]

    return load


if __name__ == "__main__":
    main(parser().parse_args())
