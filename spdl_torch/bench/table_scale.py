"""``scale``: how our loader, engine and samplers scale, one sweep per process, one row per point.

``threads``: samples that wait 10 ms, so that 64 threads have something to do on any machine.
``stages``, ``queue depth``: of an engine whose stages do nothing. ``batch size``: of tiny samples.
``samples``: memory and time of the shuffle of a dataset of that size, torch's sampler beside ours.
``ranks``: the same for one of several ranks that share 10 million samples.

The scalability law is fitted on the sweep's small points and checked against its largest one.
"""

from __future__ import annotations

import contextlib
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from .report import Metric
from .scale_samplers import measure_sampler
from .statistics import fit_scalability
from .table_engine import ours as our_engine
from .table_engine import seconds_per_item
from .tables import Contender, Table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ..measuring.reporter import Reporter
    from .report import Report
    from .tables import BenchOptions

__all__ = ["TABLES", "Waiting", "extrapolate"]

METRICS = (
    Metric(key="per_second", heading="items/s"),
    Metric(key="cpu_us", heading="CPU µs/item", digits=1, higher_is_better=False),
    Metric(key="stop_ms", heading="stop, ms", digits=1, higher_is_better=False),
    Metric(key="begin_ms", heading="iter(), ms", digits=1, higher_is_better=False),
    Metric(key="held_mib", heading="held, MiB", digits=1, higher_is_better=False),
    Metric(key="most_mib", heading="at most, MiB", digits=1, higher_is_better=False),
)
_WAIT_SECONDS = 0.01
_FITTED_UP_TO = 8


class Waiting:
    """Samples that wait, as for a disk or a network."""

    def __init__(self, count: int, seconds: float) -> None:
        self.count = count
        self.seconds = seconds

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        if self.seconds:
            time.sleep(self.seconds)
        return index


def measure(contender: Contender, settings: dict[str, Any], reporter: Reporter) -> dict[str, Any]:
    """Measure every point of the contender's sweep."""
    import torch

    torch.set_num_threads(1)
    points = settings[contender.name]
    reporter.phase("points", len(points))
    contender.run(points[0], 0.01)  # imports, and what is compiled or allocated once
    rows: dict[str, Any] = {}
    for number, point in enumerate(points, 1):
        for label, figures in contender.run(point, settings["seconds"]).items():
            rows[f"{label}{contender.name}={point}"] = figures
        reporter.done(number)
    return {"rows": rows}


def _threads(count: int, seconds: float) -> dict[str, Any]:
    num_samples = max(2 * count, round(count * seconds / _WAIT_SECONDS))
    return {"": _loader(Waiting(num_samples, _WAIT_SECONDS), num_workers=count, batch_size=1)}


def _batch_size(size: int, seconds: float) -> dict[str, Any]:
    num_samples = max(4, round(60_000 * seconds / size)) * size
    return {"": _loader(Waiting(num_samples, 0.0), num_workers=2, batch_size=size)}


def _loader(dataset: Waiting, *, num_workers: int, batch_size: int) -> dict[str, float]:
    """Measure our DataLoader over the dataset, and the time it takes to stop in a second pass,
    which is left after its first batch."""
    import spdl_torch

    from .passes import measure_pass

    loader_class: Any = spdl_torch.DataLoader
    loader = loader_class(dataset, batch_size=batch_size, num_workers=num_workers)
    figures = measure_pass(lambda: iter(loader), len(dataset), len)
    batches = iter(loader)
    next(batches)
    start = time.perf_counter()
    del batches
    stop = time.perf_counter() - start
    return {
        "per_second": figures["end_to_end"],
        "cpu_us": figures["cpu_us"],
        "stop_ms": stop * 1e3,
    }


def _stages(count: int, seconds: float) -> dict[str, Any]:
    return {"": _engine(seconds, stages=count, concurrency=1, sink=64)}


def _queue_depth(depth: int, seconds: float) -> dict[str, Any]:
    return {"": _engine(seconds, stages=1, concurrency=2, sink=depth)}


def _engine(seconds: float, *, stages: int, concurrency: int, sink: int) -> dict[str, float]:
    begin = partial(our_engine, stages=stages, concurrency=concurrency, ordered=False, sink=sink)
    count = max(200, round(20_000 * seconds))
    cpu = time.process_time()
    one = seconds_per_item(begin, count)
    cpu = time.process_time() - cpu
    pipeline = begin(range(1_000_000))
    next(pipeline.__enter__())
    start = time.perf_counter()
    pipeline.__exit__(None, None, None)
    stop = time.perf_counter() - start
    return {"per_second": 1 / one, "cpu_us": cpu / count * 1e6, "stop_ms": stop * 1e3}


def _samples(count: int, seconds: float) -> dict[str, Any]:
    return {
        f"{name}: ": measure_sampler(name, count, 1)
        for name in ("torch, shuffle", "ours, shuffle", "torch, distributed", "ours, distributed")
    }


def _ranks(count: int, seconds: float) -> dict[str, Any]:
    samples = max(1000, min(10_000_000, round(5_000_000 * seconds)))
    return {
        f"{name}: ": measure_sampler(name, samples, count)
        for name in ("torch, distributed", "ours, distributed")
    }


def extrapolate(report: Report) -> list[str]:
    """Compare the law fitted on the small points with the measurement at the largest."""
    lines = []
    for sweep in ("threads", "batch size"):
        points = sorted(
            (float(row.partition("=")[2]), report.median(row, "per_second"))
            for row in report.rows
            if row.startswith(f"{sweep}=")
        )
        small = [point for point in points if point[0] <= _FITTED_UP_TO]
        if len(small) < 3 or len(small) == len(points):
            continue
        law = fit_scalability(small)
        size, measured = points[-1]
        predicted = law(size)
        lines.append(
            f"model: {sweep} fitted on {small[0][0]:g} to {small[-1][0]:g}: contention "
            f"{law.contention:.4f}, crosstalk {law.crosstalk:.6f}; at {size:g} it says "
            f"{predicted:,.0f}/s, measured {measured:,.0f}/s ({predicted / measured - 1:+.0%})"
        )
    return lines


_SWEEPS: dict[str, tuple[Callable[..., dict[str, Any]], list[int]]] = {
    "threads": (_threads, [1, 2, 4, 8, 16, 32, 64]),
    "stages": (_stages, [1, 2, 4, 8, 16]),
    "batch size": (_batch_size, [1, 4, 16, 64, 256, 1024]),
    "queue depth": (_queue_depth, [1, 2, 4, 16, 64, 256]),
    "samples": (_samples, [1_000, 10_000, 100_000, 1_000_000, 10_000_000]),
    "ranks": (_ranks, [1, 2, 4, 8, 64]),
}


@contextlib.contextmanager
def _prepare(options: BenchOptions) -> Iterator[dict[str, Any]]:
    points = {name: points for name, (_, points) in _SWEEPS.items()}
    if options.full:
        points["samples"] = [*points["samples"], 100_000_000]
    if options.smoke:
        points = {name: found[:3] for name, found in points.items()}
    yield {"seconds": 0.01 if options.smoke else options.seconds / 2, **points}


TABLES = {
    "scale": Table(
        name="scale",
        title="How throughput, CPU, memory and the time to stop grow",
        metrics=METRICS,
        contenders=tuple(
            Contender(name=name, run=run, smoke=name in ("threads", "samples"))
            for name, (run, _) in _SWEEPS.items()
        ),
        prepare=_prepare,
        measure=measure,
        conclude=extrapolate,
    )
}
