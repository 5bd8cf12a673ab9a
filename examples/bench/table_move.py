"""``move``: how long a training loop is held up while its workers move, or one of them is killed.

``move``: samples in pure Python, declared safe on threads, so that loading begins there and moves
to processes by itself. ``killed``: two worker processes, one of which gets SIGKILL.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from statistics import median
from typing import TYPE_CHECKING, Any

from .report import Goal, Metric
from .tables import Contender, Table

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from spdl_torch.measuring.reporter import Reporter

    from .tables import BenchOptions


_BATCH, _AHEAD = 16, 4
_LOOK_SECONDS = 0.5
"""The loop's time with threads before anything moves: the median wait is of these batches."""
_MOVE_SECONDS = 10.0
"""The time within which workers must move, or the row has failed: on a machine that is busy with
something else they may have reason to stay."""
_MOVED, _KILLED = "move", "killed"
_REPORT_SECONDS = 0.1
"""The time between two looks at the report, which is no part of a step of training."""
METRICS = tuple(
    Metric(key=key, heading=heading, digits=1, higher_is_better=False)
    for key, heading in (
        ("moved_ms", "processes work after, ms"),
        ("before_ms", "next() before, ms"),
        ("longest_before_ms", "longest"),
        ("longest_ms", "longest meanwhile"),
        ("undisturbed_ms", "batches ahead, ms"),
        ("again_ms", "after a kill"),
    )
)
"""``before_ms`` and ``longest_before_ms`` are of the threads, before any process is started;
``longest_ms`` is from then until the processes' first batches are handed out. ``undisturbed_ms`` is
the time until all batches that the loader has requested are there, ``again_ms`` the same from the
moment at which one of the processes is killed."""


class Python:
    """Samples that hold the GIL for some 200 µs."""

    thread_safe = True

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return sum(i * i for i in range(3_000))


@contextlib.contextmanager
def _prepare(options: BenchOptions) -> Iterator[dict[str, Any]]:
    yield {"num_workers": max(2, options.num_workers), "smoke": options.smoke}


def _loader(num_workers: int, **options: Any) -> Any:
    import spdl_torch

    return spdl_torch.DataLoader(
        Python(10_000_000),  # type: ignore[arg-type]  # map-style by its methods
        batch_size=_BATCH,
        num_workers=num_workers,
        prefetch_factor=_AHEAD,
        **options,
    )


def _move(settings: Mapping[str, Any], reporter: Reporter) -> dict[str, float]:
    """Loop until the workers have moved, and all batches of the threads are handed out."""
    import torch

    torch.set_num_threads(1)
    num_workers = settings["num_workers"]
    loader = _loader(num_workers, multiprocessing_context="fork")
    reporter.phase("until the workers move", 1)
    began, moved = time.time(), 0
    waits: list[tuple[float, float]] = []
    """When each batch was there, and how long the loop waited for it."""
    iterator = iter(loader)
    next(iterator)
    due = time.monotonic() + _REPORT_SECONDS
    end = time.monotonic() + (0.0 if settings["smoke"] else _MOVE_SECONDS)
    # The batches that threads made ahead come first, then the children's first ones.
    while not moved or len(waits) < moved + 2 * _AHEAD * num_workers:
        asked = time.perf_counter()
        next(iterator)
        waits.append((time.time() - began, time.perf_counter() - asked))
        if moved or time.monotonic() < min(due, end):
            continue
        due = time.monotonic() + _REPORT_SECONDS
        if len(loader.report().placements) > 1:
            moved = len(waits)
        elif settings["smoke"]:
            return {"before_ms": median(wait for _, wait in waits) * 1e3}
        elif time.monotonic() > end:
            raise RuntimeError(f"the workers have not moved: {loader.report().verdict.finding}")
    since = loader.report().placements[1].since
    before = [wait for moment, wait in waits if moment < _LOOK_SECONDS]
    return {
        "moved_ms": (since - began) * 1e3,
        "before_ms": median(before) * 1e3,
        "longest_before_ms": max(before) * 1e3,
        "longest_ms": max(wait for moment, wait in waits if moment >= _LOOK_SECONDS) * 1e3,
    }


def _kill(settings: Mapping[str, Any], reporter: Reporter, context: str) -> dict[str, float]:
    """Kill a worker process, and wait for all batches that are outstanding then, its own among
    them.
    """
    num_workers = settings["num_workers"]
    options = {"isolation": "process", "processes": num_workers, "timeout": 60}
    iterator = iter(_loader(num_workers, multiprocessing_context=context, **options))
    reporter.phase("until a killed worker's batches are there", 1)
    for _ in range(10 * num_workers):
        next(iterator)
    seconds = []
    for is_killing in (False, True):
        began = time.perf_counter()
        if is_killing:
            workers = [w for w in multiprocessing.active_children() if w.name == "spdl-loader"]
            assert workers[0].pid is not None
            os.kill(workers[0].pid, signal.SIGKILL)
        for _ in range(_AHEAD * num_workers):
            next(iterator)
        seconds.append(time.perf_counter() - began)
    return {"undisturbed_ms": seconds[0] * 1e3, "again_ms": seconds[1] * 1e3}


def measure(
    contender: Contender, settings: Mapping[str, Any], reporter: Reporter
) -> Mapping[str, float]:
    """Measure one move, or one kill."""
    figures: Mapping[str, float] = contender.run(settings, reporter, **contender.arguments)
    return figures


def _killed(context: str) -> Contender:
    return Contender(
        name=f"{_KILLED}, {context}",
        run=_kill,
        arguments={"context": context},
        smoke=context == "fork",
    )


TABLES = {
    "move": Table(
        name="move",
        title="How long the loop is held up while workers move, or when one is killed",
        metrics=METRICS,
        contenders=(
            Contender(name=_MOVED, run=_move, smoke=True),
            *map(_killed, ("fork", "forkserver", "spawn")),
        ),
        prepare=_prepare,
        measure=measure,
        goals=(
            Goal(metric="moved_ms", row=_MOVED, at_most=1_000),
            Goal(metric="again_ms", row=f"{_KILLED}, fork", at_most=2_000),
            Goal(metric="again_ms", row=f"{_KILLED}, forkserver", at_most=2_000),
            Goal(metric="again_ms", row=f"{_KILLED}, spawn", at_most=2_000),
        ),
    )
}
