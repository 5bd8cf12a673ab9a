"""``array-functions``: bytes in memory to numpy arrays in hand, by the functions alone.

One load is a picture, uint8 (3, 640, 480), and its labels, uint8 (640, 480): two npy files, or one
npz archive of both, stored or deflated. Nothing is read from disk. Columns end with the number of
threads that load at once.

Ours returns views of npy and of stored npz; ``verified`` checks the checksums of stored arrays, as
numpy and SPDL do.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmark_numpy import encoded, loader, numpy_load

from spdl_torch.io import load_npy, load_npz

from .peers import imported
from .report import Goal, Metric
from .tables import Contender, Table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from .tables import BenchOptions

    Load = Callable[[bytes], Any]

KINDS = {"npy": "npy", "stored": "npz", "deflated": "npz-compressed"}
"""The format of each."""
_THREADS = (1, 2)
_AT_LEAST = {"npy": (30, 3), "stored": (50, 10), "deflated": (2.5, 1.2)}
"""Goals over numpy and over SPDL."""
METRICS = tuple(
    Metric(f"{kind}_{threads}", f"{kind} x{threads}, /s") for kind in KINDS for threads in _THREADS
)


def _prepare(options: BenchOptions, folder: Path) -> dict[str, Any]:
    return {"seconds": 0.01 if options.smoke else options.seconds / 4}


def measure(contender: Contender, settings: dict[str, Any]) -> dict[str, float]:
    """Measure every kind and number of threads."""
    figures = {}
    for kind, saved_as in KINDS.items():
        files = encoded(saved_as)
        load = loader(files, *contender.run())
        for found, expected in zip(load(), loader(files, *_numpy())(), strict=True):
            assert (found == expected).all(), f"{contender.name} loads {kind} wrong"
        for threads in _THREADS:
            figures[f"{kind}_{threads}"] = loads_per_second(load, threads, settings["seconds"])
    return figures


def _ours(*, verify: bool = False) -> tuple[Load, Load]:
    return load_npy, partial(load_npz, verify=True) if verify else load_npz


def _spdl() -> tuple[Load, Load]:
    of_spdl = imported("spdl.io")
    return of_spdl.load_npy, of_spdl.load_npz


def _numpy() -> tuple[Load, Load]:
    return numpy_load, numpy_load


def loads_per_second(load: Callable[[], object], num_threads: int, seconds: float) -> float:
    """Measure all threads together, for about that long."""
    barrier = threading.Barrier(num_threads + 1)
    start = time.perf_counter()
    load()
    # The clock is read about once a millisecond, no more often.
    group = max(1, int(1e-3 / (time.perf_counter() - start)))

    def work() -> int:
        barrier.wait()
        count, end = 0, time.perf_counter() + seconds
        while time.perf_counter() < end:
            for _ in range(group):
                load()
            count += group
        return count

    with ThreadPoolExecutor(num_threads) as threads:
        counts = [threads.submit(work) for _ in range(num_threads)]
        barrier.wait()
        start = time.perf_counter()
        return sum(count.result() for count in counts) / (time.perf_counter() - start)


def _goals() -> Iterator[Goal]:
    for metric in METRICS:
        kind = metric.key.rpartition("_")[0]
        over_numpy, over_spdl = _AT_LEAST[kind]
        yield Goal(metric.key, "ours", "numpy", at_least=over_numpy)
        yield Goal(metric.key, "ours", "SPDL", at_least=over_spdl)
        if kind == "stored":
            yield Goal(metric.key, "ours, verified", "SPDL")


TABLE = Table(
    name="array-functions",
    title="Loads a second of uint8 (3, 640, 480) and (640, 480) from bytes in memory",
    metrics=METRICS,
    contenders=(
        Contender("ours", _ours, smoke=True),
        Contender("ours, verified", partial(_ours, verify=True)),
        Contender("SPDL", _spdl, ("spdl",)),
        Contender("numpy", _numpy, smoke=True),
    ),
    prepare=_prepare,
    measure=measure,
    goals=tuple(_goals()),
    seconds=(1.5, 4.0),
)
