"""Cached batches, yielded over and over, to see how fast training is without loading."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import cycle, islice
from statistics import median
from time import perf_counter_ns
from typing import TypeVar

from ..checks import check_whole

T = TypeVar("T")


def cache_iterator(
    src: Iterable[T],
    num_caches: int,
    *,
    return_caches_after: int | None = None,
    stop_after: int | None = None,
    delete_src: bool = True,
) -> Iterator[T]:
    """Iterate over ``src``, then over its first ``num_caches`` items again and again.

    return_caches_after: items that come from ``src``; None = ``num_caches``.
    stop_after: items in all; None = no end.
    delete_src: drop ``src`` once only cached items are yielded, so that a loader's threads and
        processes end if nobody else holds it.
    Raises: ValueError: a number that leaves no item to cache, or to repeat.
    """
    run_for = num_caches if return_caches_after is None else return_caches_after
    check_whole("cache_iterator", num_caches=num_caches)
    if run_for < num_caches:
        raise ValueError(
            f"cache_iterator: return_caches_after must be >= num_caches, which is {num_caches}, "
            f"got {run_for}."
        )
    if stop_after is not None and stop_after < run_for:
        raise ValueError(
            f"cache_iterator: stop_after must be >= {run_for}, the number of items that come from "
            f"src, got {stop_after}."
        )
    items = _replayed(src, num_caches, run_for, delete_src)
    return items if stop_after is None else islice(items, stop_after)


def _replayed(src: Iterable[T], num_caches: int, run_for: int, delete_src: bool) -> Iterator[T]:
    kept: list[T] = []
    for item in islice(src, run_for):
        if len(kept) < num_caches:
            kept.append(item)
        yield item
    if delete_src:
        del src  # else this frame would keep it alive during the loop over cached items
    yield from cycle(kept)


_WARM_UP = 3  # uncounted steps: caches are cold, and threads of the loader are still ending


def cached_batches(
    batches: Iterable[T], num_batches: int, num_steps: int, report: Callable[[float], None]
) -> Iterator[T]:
    """Take ``num_batches`` and drop their source; then yield them over and over, for
    ``num_steps`` steps. At the end ``report`` is called with the median step in seconds, if there
    were more than three.
    """
    check_whole("headspace", num_batches=num_batches, num_steps=num_steps)

    def cached() -> Iterator[T]:
        kept = list(islice(batches, num_batches))  # nothing holds their iterator now: it ends
        steps: list[int] = []
        try:
            for batch in islice(cycle(kept), num_steps):
                began_ns = perf_counter_ns()
                yield batch
                steps.append(perf_counter_ns() - began_ns)
        finally:
            if len(steps) > _WARM_UP:
                report(median(steps[_WARM_UP:]) / 1e9)

    return cached()
