"""The time that a loop's own thread spends on batches that are ready; quantiles of times."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

WARM_UP = 20

_ASKING = ("_fill", "_try_put_index")  # the methods of our iterators, and of torch's


class HandOver(NamedTuple):
    """The CPU time of a loop's thread in one call of ``next``; waiting does not count.

    An iterator that does not request ahead, as without workers, has it all in ``receiving_us``.
    """

    receiving_us: float
    """Taking the batch, making the model's stream wait for it, guarding its memory, and noting how
    far the epoch is."""
    asking_us: float
    """Requesting another batch: drawing its indices, and giving them to a worker."""

    @property
    def total_us(self) -> float:
        """All of it."""
        return self.receiving_us + self.asking_us


def hand_overs(
    batches: Iterator[Any],
    num_batches: int,
    settle: Callable[[], object],
    move: Callable[[Any], Any] | None = None,
) -> list[HandOver]:
    """Measure ``num_batches`` calls of ``next``, after ``WARM_UP`` others.

    settle: called before each; returns when the next batch is probably there. With our iterators,
        it is then waited for: what a thread does to wait for a batch is not part of a hand-over.
    move: what the loop does to have the batch on the device, as a part of receiving it; None: it is
        there.
    """
    asked_ns = 0

    def timed(ask: Callable[[], Any]) -> Any:
        nonlocal asked_ns
        start_ns = time.thread_time_ns()
        try:
            return ask()
        finally:
            asked_ns += time.thread_time_ns() - start_ns

    names = [name for name in _ASKING if hasattr(batches, name)]
    for name in names:
        setattr(batches, name, partial(timed, getattr(batches, name)))
    took = []
    try:
        for _ in range(WARM_UP + num_batches):
            settle()
            wait_for_batch(batches)
            asked_ns, start_ns = 0, time.thread_time_ns()
            batch = next(batches)
            if move is not None:
                batch = move(batch)
            total_ns = time.thread_time_ns() - start_ns
            took.append(HandOver((total_ns - asked_ns) / 1e3, asked_ns / 1e3))
            del batch
    finally:
        for name in names:  # back to its own methods, which do not keep it alive
            delattr(batches, name)
    return took[WARM_UP:]


def wait_for_batch(batches: Any) -> None:
    """Wait until the workers have a batch ready, or will have none. Batches that the loop reads
    itself, of processes, are not waited for: nothing but ``next`` would find them."""
    outlet: Any = getattr(batches, "_outlet", ())  # torch's has none, and () has no batch ever
    if hasattr(outlet, "heard"):  # of processes, as this thread reads what they send
        return
    while outlet != () and not len(outlet) and not outlet.closed:
        time.sleep(0.001)


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value that a share of all values, 0-1, does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
