"""One pass over a loader, timed: the measurements of every table whose contenders are loaders."""

from __future__ import annotations

import gc
import os
import time
from typing import TYPE_CHECKING, Any

from .cpu_time import tree_cpu_seconds
from .memory import tree_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def measure_pass(
    make_batches: Callable[[], Iterator[Any]],
    num_samples: int,
    size_of: Callable[[Any], int],
    num_skipped: int = 1,
) -> dict[str, float]:
    """Go through the batches once.

    num_skipped: batches after which the speed is measured, at most half of all: the workers make
        the first ones all at once, at a rate that does not last.
    Returns: ``per_second``: samples a second, from the last of these batches in hand to the last
        one of all;
        ``end_to_end``: from ``iter()`` until the workers have ended; ``cpu_ms``, ``cpu_us``: CPU
        of the process and its workers over the same time, per sample; ``first_batch_ms``: from
        ``iter()``; ``at_end_mib``: memory of the process tree with the last batch in hand.
    Raises: RuntimeError: there were more or fewer samples than expected.
    """
    gc.collect()  # 100 ms after torch's imports, and else part of some rows' time by chance
    cpu, start = tree_cpu_seconds(), time.perf_counter()
    batches = make_batches()
    batch = next(batches, None)
    if batch is None:
        raise RuntimeError(f"the loader gave no batch, expected {num_samples} samples.")
    count = size_of(batch)
    first = steady = last = time.perf_counter()
    num_first = count
    num_skipped = max(1, min(num_skipped, num_samples // count // 2))
    looking, looking_cpu, at_end = 0.0, 0.0, 0.0
    for number, batch in enumerate(batches, 2):
        count += size_of(batch)
        if number == num_skipped:
            steady, num_first = time.perf_counter(), count
        if count >= num_samples:
            # Workers that are processes live until the iterator is asked for more.
            last, cpu_before = time.perf_counter(), time.thread_time()
            at_end = tree_bytes(os.getpid()) or 0.0
            looking, looking_cpu = time.perf_counter() - last, time.thread_time() - cpu_before
    batch = None
    del batches  # ends the workers
    end = time.perf_counter() - looking
    if count != num_samples:
        raise RuntimeError(f"the loader gave {count} samples, expected {num_samples}.")
    cpu_seconds_of_one = (tree_cpu_seconds() - cpu - looking_cpu) / count
    figures = {
        "end_to_end": count / (end - start),
        "cpu_ms": cpu_seconds_of_one * 1e3,
        "cpu_us": cpu_seconds_of_one * 1e6,
        "first_batch_ms": (first - start) * 1e3,
        "at_end_mib": at_end / 2**20,
    }
    if last > steady:
        figures["per_second"] = (count - num_first) / (last - steady)
    return figures
