"""Arrays from bytes in memory to numpy arrays in hand: loads a second, against numpy and SPDL.

One load is a picture, uint8 (3, 640, 480), and its labels, uint8 (640, 480): two npy files, or one
npz archive of both, stored or deflated. The bytes are in memory; nothing is read from disk.

- ours: ``spdl_torch.io.load_npy`` and ``load_npz``, which return views of npy and stored npz;
- ours, verified: with ``verify=True``, which compares the checksums of stored arrays, as numpy and
  SPDL do;
- ours, copied: with ``copy=True``, which gives every array memory of its own, as numpy does;
- SPDL's functions of the same names, which return views too;
- ``numpy.load`` of a ``BytesIO``.

Deflated pictures are smooth, and noisy (one level up or down at every pixel, which leaves little
to compress). Columns end with the number of threads that load at once.

Goals, for one and two threads: npy 30 times numpy and 3 times SPDL; stored npz 50 and 10 times;
deflated npz, smooth, 2.5 and 1.2 times.

    python examples/benchmark_arrays.py [--rounds N] [--json FILE] [--smoke]
"""

from __future__ import annotations

import io
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from _arrays import encode, sample
from _bench import (
    Goal,
    Metric,
    Report,
    argument_parser,
    in_fresh_process,
    installed,
    interleaved,
    left_out,
    machine,
    run_program,
)

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

OURS, VERIFIED, COPIED = "ours", "ours, verified", "ours, copied"
SPDL, NUMPY = "SPDL", "numpy"
KINDS = {"npy": 0, "stored": 0, "deflated": 0, "noisy": 1}
"""With the noise of each."""
THREADS = (1, 2)
METRICS = tuple(
    Metric(key=f"{kind}_{num_threads}", heading=f"{kind} x{num_threads}")
    for kind in KINDS
    for num_threads in THREADS
)
GOALS = {"npy": (30, 3), "stored": (50, 10), "deflated": (2.5, 1.2), "noisy": (None, None)}
"""Over numpy and over SPDL."""


def main(options: argparse.Namespace) -> Report:
    """Measure every library that is installed, each in a fresh process."""
    rows = [OURS, VERIFIED, COPIED, SPDL, NUMPY]
    remarks = []
    if not installed("spdl"):
        rows.remove(SPDL)
        remarks.append(left_out("spdl", SPDL))
    if not installed("deflate"):
        remarks.append("deflate is not installed, so zlib inflates: pip install deflate")
    seconds = 0.02 if options.smoke else 0.5
    report = Report(
        title="Loads a second of uint8 (3, 640, 480) and (640, 480) from bytes in memory",
        metrics=METRICS,
        settings=machine(numpy=np.__version__, rounds=options.rounds),
        remarks=remarks,
    )
    measure_one = partial(in_fresh_process, __file__, seconds=seconds)
    interleaved(report, rows, options.rounds, lambda row: measure_one(row=row))
    for metric in METRICS:
        over_numpy, over_spdl = GOALS[metric.key.rpartition("_")[0]]
        goal = partial(Goal, metric=metric.key, row=OURS)
        report.goals += [
            goal(over=NUMPY, at_least=over_numpy),
            goal(over=SPDL, at_least=over_spdl),
        ]
        if metric.key.startswith("stored"):
            report.goals += [goal(row=VERIFIED, over=SPDL), goal(row=COPIED, over=NUMPY)]
    return report


def measure(row: str, seconds: float) -> dict[str, float]:
    """Every kind and number of threads, in this process."""
    figures = {}
    for kind, noise in KINDS.items():
        saved_as = {"npy": "npy", "stored": "npz"}.get(kind, "npz-compressed")
        arrays = sample(noise=noise)
        load = loader(row, saved_as, encode(saved_as, arrays))
        for found, expected in zip(load(), arrays.values(), strict=True):
            assert np.array_equal(found, expected), f"{row} loads {kind} wrong"
        for num_threads in THREADS:
            figures[f"{kind}_{num_threads}"] = loads_per_second(load, num_threads, seconds)
    return figures


def loader(row: str, saved_as: str, files: list[bytes]) -> Callable[[], tuple[Any, Any]]:
    """A function that loads both arrays."""
    load_npy, load_npz = functions_of(row)
    if saved_as == "npy":
        first, second = files
        return lambda: (load_npy(first), load_npy(second))
    (content,) = files

    def load() -> tuple[Any, Any]:
        archive = load_npz(content)
        return archive["image"], archive["label"]

    return load


def functions_of(row: str) -> tuple[Callable[[bytes], Any], Callable[[bytes], Any]]:
    """The library's functions for npy and npz."""
    if row == NUMPY:

        def load(content: bytes) -> Any:
            return np.load(io.BytesIO(content))

        return load, load
    if row == SPDL:
        import spdl.io

        return spdl.io.load_npy, spdl.io.load_npz
    from spdl_torch.io import load_npy, load_npz

    if row == COPIED:
        return partial(load_npy, copy=True), partial(load_npz, copy=True)
    return load_npy, partial(load_npz, verify=True) if row == VERIFIED else load_npz


def loads_per_second(load: Callable[[], object], num_threads: int, seconds: float) -> float:
    """All threads together, for about that long."""
    counts = [0] * num_threads
    barrier = threading.Barrier(num_threads + 1)
    start = time.perf_counter()
    load()
    # The clock is not looked at more often than about every millisecond.
    group = max(1, int(1e-3 / (time.perf_counter() - start)))

    def work(place: int) -> None:
        barrier.wait()
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            for _ in range(group):
                load()
            counts[place] += group

    threads = [threading.Thread(target=work, args=(place,)) for place in range(num_threads)]
    for thread in threads:
        thread.start()
    barrier.wait()
    start = time.perf_counter()
    for thread in threads:
        thread.join()
    return sum(counts) / (time.perf_counter() - start)


if __name__ == "__main__":
    run_program(main, argument_parser(__doc__, rounds=5, data=False), child=measure)
