"""Formats of arrays and pools of workers: loads a second and CPU time, with confidence intervals.

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
and the largest value; ``--csv`` writes the mean and its 95 % confidence interval, for
benchmark_numpy_plot.py to draw.

    python examples/benchmark_numpy.py [--workers N [N ...] | --all-workers] [--iterations N]
        [--rounds N] [--csv FILE] [--smoke]
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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from spdl_torch.autotune import Limits
from spdl_torch.io import load_npy, load_npz

Combination = tuple[str, str, str, int]
Figures = dict[str, list[float]]

ALL_WORKERS = (1, 2, 4, 8, 16, 32)


def parser() -> argparse.ArgumentParser:
    """Return a parser of the command line."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--smoke", action="store_true", help="tiny amounts; figures mean nothing")
    options.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    options.add_argument(
        "--workers",
        type=int,
        nargs="+",
        metavar="N",
        default=[n for n in ALL_WORKERS if n <= 2 * max(1, Limits.of_this_machine().num_cores)],
        help="default: powers of two up to twice the cores and to 32",
    )
    options.add_argument(
        "--all-workers",
        action="store_const",
        const=list(ALL_WORKERS),
        dest="workers",
        help="1, 2, 4, 8, 16 and 32, whatever the machine has",
    )
    options.add_argument(
        "--iterations",
        type=int,
        default=1000,
        metavar="N",
        help="loads of a combination a round (default: %(default)s), more if they take no 0.3 s",
    )
    options.add_argument("--csv", type=Path, metavar="FILE", help="for the plot")
    return options


BATCH = 16
"""Loads per task."""
CASES = (
    *(("torch", "torch"), ("npy", "numpy"), ("npy", "ours"), ("npz", "numpy"), ("npz", "ours")),
    *(("npz-compressed", "numpy"), ("npz-compressed", "ours")),
)
POOLS = ("threads", "processes")
METRICS = {"loads_per_second": "loads/s", "cpu_ms_per_load": "CPU ms/load"}
"""Name and heading."""
COLUMNS = (
    *("pool", "format", "loader", "num_workers", "metric"),
    *("mean", "interval_low", "interval_high", "num_repeats"),
)

T_QUANTILES = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160),
    *(2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056),
    *(2.052, 2.048, 2.045, 2.042),
)
"""Student's t, two-sided 95 %, for 1 to 30 degrees of freedom: NIST/SEMATECH e-Handbook of
Statistical Methods, 1.3.6.7.2."""
NORMAL_QUANTILE = 1.960


def main(options: argparse.Namespace) -> None:
    """Measure all combinations round after round, print the table and write the CSV."""
    workers, rounds = sorted(set(options.workers)), options.rounds
    amounts = {"num_loads": options.iterations, "seconds": 0.3}
    if options.smoke:
        workers, rounds, amounts = [1], 1, {"num_loads": BATCH, "seconds": 0.0}
    combinations = [
        (pool, saved_as, library, count)
        for pool, (saved_as, library), count in itertools.product(POOLS, CASES, workers)
    ]
    found: dict[Combination, Figures] = {
        each: {metric: [] for metric in METRICS} for each in combinations
    }
    for number in range(rounds):
        for each in combinations if number % 2 == 0 else reversed(combinations):
            print(f"round {number + 1}/{rounds}: {name_of(each)}", file=sys.stderr, flush=True)
            for metric, value in measure(*each, **amounts).items():
                found[each][metric].append(value)
    print_table(found)
    if options.csv:
        write_csv(options.csv, found)
        print(f"Wrote {options.csv}.")


def name_of(combination: Combination) -> str:
    """Return the name of a row."""
    pool, saved_as, library, count = combination
    return f"{saved_as}, {library}, {count} {pool}"


def print_table(found: dict[Combination, Figures]) -> None:
    """Print a row for each combination."""
    print("Loads of uint8 (3, 640, 480) and (640, 480) from bytes in memory")
    print(f"{'':<36}" + "".join(f"{heading:>36}" for heading in METRICS.values()))
    for combination, figures in found.items():
        print(f"{name_of(combination):<36}" + "".join(map(spread, figures.values())))


def spread(values: list[float]) -> str:
    """Return the median, the smallest and the largest value, as one cell of the table."""
    low, middle, high = (f"{x:,.4g}" for x in (min(values), statistics.median(values), max(values)))
    return f"{f'{middle} ({low}..{high})':>36}"


def measure(
    pool: str, saved_as: str, library: str, num_workers: int, *, num_loads: int, seconds: float
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
    arrays = sample()
    if saved_as == "npy":
        return [written(np.save, array) for array in arrays.values()]
    if saved_as == "torch":
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        return [written(lambda file: torch.save(tensors, file))]
    return [written(np.savez if saved_as == "npz" else np.savez_compressed, **arrays)]


def sample() -> dict[str, Any]:
    """Return a smooth picture and a map of labels, since random bytes cannot be compressed."""
    rows, columns = np.mgrid[:640, :480]
    waves = [np.sin(rows / a + columns / b) for a, b in ((53, 71), (97, 41), (61, 83))]
    picture = (127.5 + 127.5 * np.stack(waves)).astype(np.uint8)
    return {"image": picture, "label": picture[0] // 32}


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
    _load = loader(saved_as, library, files)


def load_batch() -> list[Any]:
    """Load a batch: a task."""
    return [_load() for _ in range(BATCH)]


def loader(saved_as: str, library: str, files: list[bytes]) -> Callable[[], Any]:
    """Return a function that loads a picture and its labels."""
    if library == "torch":
        return lambda: tuple(torch.load(io.BytesIO(files[0]), weights_only=True).values())
    if saved_as == "npy":
        if library == "ours":
            return lambda: [load_npy(content) for content in files]
        return lambda: [np.load(io.BytesIO(content)) for content in files]

    def load() -> tuple[Any, Any]:
        content = files[0]
        archive = load_npz(content) if library == "ours" else np.load(io.BytesIO(content))
        return archive["image"], archive["label"]

    return load


def write_csv(path: Path, found: dict[Combination, Figures]) -> None:
    """Write a line for each combination and metric."""
    with open(path, "w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(COLUMNS)
        for combination, figures in found.items():
            for metric, values in figures.items():
                mean, half = statistics.mean(values), half_interval(values)
                numbers = [f"{x:.6g}" for x in (mean, mean - half, mean + half)]
                lines.writerow([*combination, metric, *numbers, len(values)])


def half_interval(values: Sequence[float]) -> float:
    """Return half the width of the mean's 95 % confidence interval; NaN for a single value."""
    if len(values) < 2:
        return float("nan")
    freedom = len(values) - 1
    quantile = T_QUANTILES[freedom - 1] if freedom <= len(T_QUANTILES) else NORMAL_QUANTILE
    return quantile * statistics.stdev(values) / len(values) ** 0.5


if __name__ == "__main__":
    main(parser().parse_args())
