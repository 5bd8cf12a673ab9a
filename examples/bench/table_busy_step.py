"""``busy-step``: a trainer that wants the interpreter all the time, beside a loader in full swing.

It is the worst case for threads in its process: a step is 24,000 times ``x.add_(1)`` on 8 floats,
nothing but the interpreter launching operations. Beside it one worker loads photographs (batches
of 32 at 224 x 224) as fast as it can. So that the loader never rests, a thread takes every batch as
soon as it is ready; a trainer would also pay what that costs (in it, torch rebuilds the batch from
shared memory).

Blocks of steps alternate, one without a loader and one beside it. ``step`` is the median, over the
pairs of adjacent blocks, of the loaded block's time over the other's, so that a machine that grows
slower does not count.
"""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from .images import spdl_decoding
from .loaders import nothing, ours, torch_loader
from .recipe import photographs
from .report import Goal, Metric
from .table_photographs import make_work
from .tables import Contender, Table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from .loaders import Batches
    from .tables import BenchOptions

_BATCH = 32
_ENDLESS = 100_000
"""Photographs: far more than will be read."""
_OPERATIONS = 24_000
METRICS = (
    Metric("step_ratio", "step / step without loading", 3),
    Metric("step_ms", "step without loading, ms", 1),
    Metric("per_second", "images/s meanwhile"),
)


def _prepare(options: BenchOptions, folder: Path) -> dict[str, Any]:
    return {
        **photographs(options, folder),
        "crop": False,
        "num_workers": 1,  # the trainer has the other one of two cores
        "batch_size": 4 if options.smoke else _BATCH,
        "pairs": 2 if options.smoke else 8,
        "steps": 1 if options.smoke else max(1, round(2.5 * options.seconds)),
        "operations": _OPERATIONS // 20 if options.smoke else _OPERATIONS,
    }


def measure(contender: Contender, settings: dict[str, Any]) -> dict[str, float]:
    """Measure pairs of blocks; every other pair begins with the other block, so that a drift
    cancels."""
    torch.set_num_threads(1)
    train = partial(_steps, settings["steps"], settings["operations"])
    work = make_work(settings, _ENDLESS, **contender.arguments)
    work.load_group([0])
    make_batches = contender.run(work)
    ratios, seconds, count, loading = [], [], 0, 0.0
    for number in range(settings["pairs"]):
        block: dict[bool, float] = {}
        for with_loader in (False, True) if number % 2 == 0 else (True, False):
            if not with_loader:
                block[False] = train()
                continue
            with batches_taken(make_batches, work.size_of) as sizes:
                before = len(sizes)
                block[True] = train()
                count += sum(sizes[before:])
            loading += block[True]
        ratios.append(block[True] / block[False])
        seconds.append(block[False] / settings["steps"])
    return {
        "step_ratio": median(ratios),
        "step_ms": median(seconds) * 1e3,
        "per_second": count / loading,
    }


def _steps(count: int, operations: int) -> float:
    """Launch small operations without a pause; return the seconds."""
    x = torch.zeros(8)
    start = time.perf_counter()
    for _ in range(count * operations):
        x.add_(1)
    return time.perf_counter() - start


@contextlib.contextmanager
def batches_taken(make_batches: Batches, size_of: Callable[[Any], int]) -> Iterator[list[int]]:
    """Have a thread take every batch as soon as it is ready; yield the list of their sizes, which
    grows. It begins with the first two, and ends when the loader has; an error in the loader is
    raised then."""
    sizes: list[int] = []
    running, ended = threading.Event(), threading.Event()

    def take() -> None:
        try:
            for batch in make_batches():
                sizes.append(size_of(batch))
                if len(sizes) == 2:
                    running.set()
                if ended.is_set():
                    return  # drops the iterator, which ends the loader
        finally:
            running.set()

    with ThreadPoolExecutor(1) as threads:
        taking = threads.submit(take)
        running.wait()
        try:
            yield sizes
        finally:
            ended.set()
        taking.result()


def _one(name: str, run: Any, data: str, *needs: str, **more: Any) -> Contender:
    return Contender(name, run, needs, {"data": data}, **more)


_goal = partial(Goal, "step_ratio", "ours, threads")
TABLE = Table(
    name="busy-step",
    title="A trainer that holds the GIL, beside one worker that loads photographs",
    metrics=METRICS,
    contenders=(
        _one("ours, threads", ours, "batched", smoke=True),
        _one("ours, process", partial(ours, isolation="process"), "batched"),
        _one("torch, forked", torch_loader, "torchvision"),
        _one("SPDL", partial(spdl_decoding, crop=False), "pillow", "spdl", decodes_with_spdl=True),
        _one("nothing", nothing, "batched", smoke=True),
    ),
    prepare=_prepare,
    measure=measure,
    goals=(_goal(at_most=1.08), _goal("torch, forked"), _goal("SPDL"), _goal("nothing")),
    seconds=(3.0, 4.0),
)
