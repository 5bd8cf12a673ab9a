"""``engine``: stages that do nothing, so that what is left is the engine's own cost."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

from .peers import imported
from .report import Goal, Metric
from .tables import Contender, Table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from .tables import BenchOptions

_START_STOP_REPEATS = 5
_ITEMS_A_SECOND = 20_000
METRICS = (
    Metric("three_stages_us", "3 stages x 4, µs/item", 1),
    Metric("one_stage_us", "1 stage ordered, µs/item", 1),
    Metric("fetches_us", "256 fetches at once, µs/item", 1),
    Metric("start_stop_ms", "start, 1 item, stop: ms", 1),
)


def trivial(item: int) -> int:
    """Return the item: a stage that costs nothing."""
    return item


async def fetch(item: int) -> int:
    """Return the item after 1 ms: of 256 at once, one is due every 4 µs."""
    await asyncio.sleep(0.001)
    return item


def measure(contender: Contender, settings: dict[str, Any]) -> dict[str, float]:
    """Measure one round of one engine. The peers get a tenth of the items; they take as long."""
    logging.getLogger("spdl").setLevel(logging.CRITICAL)
    count = settings["items"] if contender.name == "ours" else settings["items"] // 10
    three = partial(contender.run, stages=3, concurrency=4, ordered=False, sink=64)
    one = partial(contender.run, stages=1, concurrency=1, ordered=True, sink=3)
    figures = {
        "three_stages_us": seconds_per_item(three, count) * 1e6,
        "one_stage_us": seconds_per_item(one, count) * 1e6,
    }
    if contender.name != "torchdata.nodes":  # no coroutines there, and they cannot be stopped
        shape = {"stages": 1, "concurrency": 256, "ordered": False, "sink": 64, "op": fetch}
        fetches = partial(contender.run, **shape)
        figures["fetches_us"] = seconds_per_item(fetches, settings["items"] // 10) * 1e6
        seconds = median(start_stop_seconds(three) for _ in range(_START_STOP_REPEATS))
        figures["start_stop_ms"] = seconds * 1e3
    return figures


def seconds_per_item(pipeline: Callable[..., Any], count: int) -> float:
    """Measure from the first item in hand to the last, without starting and ending."""
    with pipeline(range(count + 1)) as items:
        next(items)
        start = time.perf_counter()
        received = sum(1 for _ in itertools.islice(items, count))
        seconds = time.perf_counter() - start
    assert received == count, f"{received=} {count=}"
    return seconds / count


def start_stop_seconds(pipeline: Callable[..., Any]) -> float:
    """Build, start, take one item of many, stop."""
    start = time.perf_counter()
    with pipeline(range(1_000_000)) as items:
        next(items)
    return time.perf_counter() - start


def ours(source: range, **shape: Any) -> AbstractContextManager[Iterator[int]]:
    """Return the items of a running pipeline of ours."""
    from spdl_torch.pipeline import PipelineBuilder

    return running(PipelineBuilder(), source, **shape)


def spdl(source: range, **shape: Any) -> AbstractContextManager[Iterator[int]]:
    """Return the same of SPDL: the same words, another import."""
    return running(imported("spdl.pipeline").PipelineBuilder(), source, **shape)


@contextlib.contextmanager
def running(
    builder: Any,
    source: range,
    *,
    stages: int,
    concurrency: int,
    ordered: bool,
    sink: int,
    op: Callable[[int], Any] = trivial,
) -> Iterator[Iterator[int]]:
    """Yield the items of either builder's pipeline, since both have the same methods."""
    builder.add_source(source)
    for _ in range(stages):
        order = "input" if ordered else "completion"
        builder.pipe(op, concurrency=concurrency, output_order=order)
    pipeline = builder.add_sink(sink).build(num_threads=stages * concurrency)
    with pipeline.auto_stop():
        yield iter(pipeline)


@contextlib.contextmanager
def nodes(
    source: range, *, stages: int, concurrency: int, ordered: bool, sink: int
) -> Iterator[Iterator[int]]:
    """torchdata's nodes; they have no sink, so the last one prefetches as much instead.

    They cannot be stopped either: their threads end some time after the last reference is gone.
    """
    torch_nodes = imported("torchdata.nodes")
    node = torch_nodes.IterableWrapper(source)
    for _ in range(stages):
        node = torch_nodes.ParallelMapper(
            node, trivial, num_workers=concurrency, in_order=ordered, method="thread"
        )
    yield iter(torch_nodes.Loader(torch_nodes.Prefetcher(node, prefetch_factor=sink)))


def _prepare(options: BenchOptions, folder: Path) -> dict[str, Any]:
    return {"items": 1000 if options.smoke else round(_ITEMS_A_SECOND * options.seconds / 2)}


TABLE = Table(
    name="engine",
    title="The engine alone: stages that do nothing, statistics on",
    metrics=METRICS,
    contenders=(
        Contender("ours", ours, smoke=True),
        Contender("SPDL", spdl, ("spdl",)),
        Contender("torchdata.nodes", nodes, ("torchdata",)),
    ),
    prepare=_prepare,
    measure=measure,
    peer="SPDL",
    goals=(
        Goal("three_stages_us", "ours", at_most=8),
        Goal("three_stages_us", "ours", "SPDL"),
        Goal("one_stage_us", "ours", at_most=12),
        Goal("one_stage_us", "ours", "SPDL"),
        Goal("fetches_us", "ours", "SPDL"),
        Goal("start_stop_ms", "ours", at_most=3),
        Goal("start_stop_ms", "ours", "SPDL"),
        Goal("three_stages_us", "ours", "torchdata.nodes"),
    ),
)
