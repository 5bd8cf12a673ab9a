"""What the engine itself costs: stages that do nothing, in microseconds an item.

Shows, for our engine, SPDL's and torchdata's nodes side by side:

- 3 stages of 4 workers each, statistics on, 64 items of room in the sink;
- 1 stage of 1 worker in input order, 3 items of room in the sink;
- how long it takes to build a pipeline, start it, take one item and stop it.

Prints medians and spread over the rounds, the ratios, and whether the goals were reached: at most
15 µs an item and 5 ms to the end of the first, and a 30th of SPDL's cost for 3 stages.

    python examples/benchmark_engine.py [--rounds N] [--json FILE] [--smoke]
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

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
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager

METRICS = (
    Metric(key="three_stages_us", heading="3 stages x 4, µs/item", digits=1),
    Metric(key="one_stage_us", heading="1 stage ordered, µs/item", digits=1),
    Metric(key="start_stop_ms", heading="start, 1 item, stop: ms", digits=1),
)
PEERS = {"SPDL": "spdl", "torchdata.nodes": "torchdata"}
_START_STOP_REPEATS = 5


def trivial(item: int) -> int:
    """A stage that costs nothing."""
    return item


def main(options: argparse.Namespace) -> Report:
    """Measure every engine that is installed."""
    num_items = 500 if options.smoke else 20_000
    engines = ["ours", *(name for name, module in PEERS.items() if installed(module))]
    report = Report(
        title="The engine alone: stages that do nothing",
        metrics=METRICS,
        settings=machine(items=num_items, rounds=options.rounds),
        remarks=[left_out(mod, name) for name, mod in PEERS.items() if name not in engines],
    )
    measure_one = partial(in_fresh_process, __file__, num_items=num_items)
    interleaved(report, engines, options.rounds, lambda name: measure_one(engine=name))
    report.goals = [
        Goal(metric="three_stages_us", row="ours", at_most=15),
        Goal(metric="three_stages_us", row="ours", over="SPDL", at_most=1 / 30),
        Goal(metric="one_stage_us", row="ours", over="SPDL"),
        Goal(metric="start_stop_ms", row="ours", at_most=5),
        Goal(metric="start_stop_ms", row="ours", over="SPDL"),
        Goal(metric="three_stages_us", row="ours", over="torchdata.nodes"),
    ]
    return report


def measure(engine: str, num_items: int) -> Mapping[str, float]:
    """One round of one engine. The peers get a tenth of the items; they take as long."""
    logging.getLogger("spdl").setLevel(logging.CRITICAL)
    count = num_items if engine == "ours" else num_items // 10
    three = partial(ENGINES[engine], stages=3, concurrency=4, ordered=False, sink=64)
    one = partial(ENGINES[engine], stages=1, concurrency=1, ordered=True, sink=3)
    figures = {
        "three_stages_us": seconds_per_item(three, count) * 1e6,
        "one_stage_us": seconds_per_item(one, count) * 1e6,
    }
    if engine != "torchdata.nodes":
        seconds = median(start_stop_seconds(three) for _ in range(_START_STOP_REPEATS))
        figures["start_stop_ms"] = seconds * 1e3
    return figures


def seconds_per_item(pipeline: Callable[..., object], count: int) -> float:
    """From the first item in hand to the last one: starting and ending are not in it."""
    with pipeline(range(count + 1)) as items:
        next(items)
        start = time.perf_counter()
        received = sum(1 for _ in itertools.islice(items, count))
        seconds = time.perf_counter() - start
    assert received == count, f"{received=} {count=}"
    return seconds / count


def start_stop_seconds(pipeline: Callable[..., object]) -> float:
    """Build, start, take one item of many, stop."""
    start = time.perf_counter()
    with pipeline(range(1_000_000)) as items:
        next(items)
    return time.perf_counter() - start


def ours(source: range, **shape: Any) -> AbstractContextManager[Iterator[int]]:
    """The items of a running pipeline of ours."""
    from spdl_torch.pipeline import PipelineBuilder

    return running(PipelineBuilder(), source, **shape)


def spdl(source: range, **shape: Any) -> AbstractContextManager[Iterator[int]]:
    """The same words, SPDL's import."""
    from spdl.pipeline import PipelineBuilder

    return running(PipelineBuilder(), source, **shape)


@contextlib.contextmanager
def running(
    builder: Any, source: range, *, stages: int, concurrency: int, ordered: bool, sink: int
) -> Iterator[Iterator[int]]:
    """Either builder, for both have the same methods."""
    builder.add_source(source)
    for _ in range(stages):
        order = "input" if ordered else "completion"
        builder.pipe(trivial, concurrency=concurrency, output_order=order)
    pipeline = builder.add_sink(sink).build(num_threads=stages * concurrency)
    with pipeline.auto_stop():
        yield iter(pipeline)


@contextlib.contextmanager
def nodes(
    source: range, *, stages: int, concurrency: int, ordered: bool, sink: int
) -> Iterator[Iterator[int]]:
    """torchdata's nodes; they have no sink, the last one prefetches as much instead.

    They have no stop either: their threads end some time after the last reference is gone.
    """
    from torchdata.nodes import IterableWrapper, Loader, ParallelMapper, Prefetcher

    node = IterableWrapper(source)
    for _ in range(stages):
        node = ParallelMapper(
            node, trivial, num_workers=concurrency, in_order=ordered, method="thread"
        )
    yield iter(Loader(Prefetcher(node, prefetch_factor=sink)))


ENGINES = {"ours": ours, "SPDL": spdl, "torchdata.nodes": nodes}


if __name__ == "__main__":
    run_program(main, argument_parser(__doc__, rounds=5, data=False), child=measure)
