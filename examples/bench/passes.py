"""One pass over a loader, timed: the measurements of every table whose contenders are loaders."""

from __future__ import annotations

import gc
import os
import time
from typing import TYPE_CHECKING, Any

import torch

from .processes import tree_bytes, tree_cpu_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .loaders import Work
    from .tables import BenchOptions, Contender


def samples_of(options: BenchOptions, per_second: float, batch_size: int) -> int:
    """Return the number of samples in a pass, in whole batches: ``--seconds`` at a rate, 4 batches
    with ``--smoke``."""
    if options.smoke:
        return 4 * batch_size
    return max(4, round(per_second * options.seconds / batch_size)) * batch_size


def measure_loader(
    contender: Contender, settings: dict[str, Any], make_work: Callable[..., Work]
) -> dict[str, float]:
    """Measure one pass; ``make_work(settings, num_samples, **arguments)`` gives the contender's
    :class:`Work`.

    One sample is loaded here, so that forked workers find imports done; then two batches for each
    worker warm up what is compiled or allocated once.
    """
    torch.set_num_threads(1)  # every loader does its work on threads or processes of its own
    num_samples = settings["num_samples"]
    work = make_work(settings, num_samples, **contender.arguments)
    work.load_group([0])
    num_warm = min(num_samples, 2 * settings["batch_size"] * max(1, settings["num_workers"]))
    warm = make_work(settings, num_warm, **contender.arguments)
    measure_pass(contender.run(warm), num_warm, warm.size_of)
    return measure_pass(contender.run(work), num_samples, work.size_of, work.num_workers)


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
        ``end_to_end``: from ``iter()`` until the workers have ended; ``cpu_ms``: CPU of the process
        and its workers over the same time, per sample; ``first_batch_ms``: from ``iter()``;
        ``at_end_mib``: memory of the process tree with the last batch in hand.
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
            at_end = tree_bytes(os.getpid())
            looking, looking_cpu = time.perf_counter() - last, time.thread_time() - cpu_before
    batch = None
    del batches  # ends the workers
    end = time.perf_counter() - looking
    if count != num_samples:
        raise RuntimeError(f"the loader gave {count} samples, expected {num_samples}.")
    figures = {
        "end_to_end": count / (end - start),
        "cpu_ms": (tree_cpu_seconds() - cpu - looking_cpu) / count * 1e3,
        "first_batch_ms": (first - start) * 1e3,
        "at_end_mib": at_end / 2**20,
    }
    if last > steady:
        figures["per_second"] = (count - num_first) / (last - steady)
    return figures
