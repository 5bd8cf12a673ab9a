"""The time that a loop's own thread spends on batches that are ready."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["hand_over_microseconds"]

WARM_UP = 20


def hand_over_microseconds(
    batches: Iterator[Any], num_batches: int, settle: Callable[[], object]
) -> list[float]:
    """Return the CPU time of this thread in each of ``num_batches`` calls of ``next``: to receive a
    batch, let the model's stream wait for it and guard its memory, and to ask for another one.

    settle: called before each; returns when the next batch is there. ``WARM_UP`` more are taken
    before. CPU time: what the thread waits for is not its work.
    """
    took = []
    for _ in range(WARM_UP + num_batches):
        settle()
        start_ns = time.thread_time_ns()
        batch = next(batches)
        took.append((time.thread_time_ns() - start_ns) / 1e3)
        del batch
    return took[WARM_UP:]
