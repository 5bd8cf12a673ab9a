"""``overhead``: what observation costs, statistics and the flight recorder on against off.

Both kinds of passes take turns in one process, so that whatever the machine does happens to both:

- photographs, decoded and resized one by one on two threads of the DataLoader: how much longer a
  pass takes with ``stats=True``, the default, in percent;
- pipelines whose stages do nothing, the worst case: how much more an item costs, in microseconds,
  with one stage of one thread, with three stages of four threads, and with three stages while
  ``tracing()`` records every item.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from .images import Photographs, jpegs, load_ours, photographs
from .report import Goal, Metric
from .tables import Contender, Table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ..measuring.reporter import Reporter
    from .tables import BenchOptions

__all__ = ["TABLES"]

_PASSES = 9
_ROW = "ours, watched against not"
_more = partial(Metric, digits=2, higher_is_better=False)
METRICS = (
    _more(key="photographs_percent", heading="photographs, %"),
    _more(key="one_stage_us", heading="1 stage x 1, µs/item"),
    _more(key="three_stages_us", heading="3 stages x 4, µs/item"),
    _more(key="three_stages_traced_us", heading="the same, tracing(), µs/item"),
)


@contextlib.contextmanager
def _prepare(options: BenchOptions) -> Iterator[dict[str, Any]]:
    with photographs(options.data, 16 if options.smoke else 200) as folder:
        yield {
            "folder": str(folder),
            "files": len(jpegs(folder)),
            "passes": 1 if options.smoke else _PASSES,
            "images": 16 if options.smoke else round(200 * options.seconds),
            "items": 500 if options.smoke else round(10_000 * options.seconds),
        }


def measure(contender: Contender, settings: dict[str, Any], reporter: Reporter) -> dict[str, float]:
    """Measure passes with and without, in turns; medians over the pairs."""
    figures: dict[str, float] = contender.run(settings, reporter)
    return figures


def _watched(settings: dict[str, Any], reporter: Reporter) -> dict[str, float]:
    import torch

    torch.set_num_threads(1)
    files, num_items, passes = jpegs(settings["folder"]), settings["items"], settings["passes"]
    paths = [files[index % len(files)] for index in range(settings["images"])]
    one = partial(_trivial_pass, num_items, stages=1, concurrency=1)
    three = partial(_trivial_pass, num_items, stages=3, concurrency=4)
    reporter.phase("measuring", 0)
    return {
        "photographs_percent": 100 * _paired(partial(_photograph_pass, paths), passes, share=True),
        "one_stage_us": _paired(one, passes) / num_items * 1e6,
        "three_stages_us": _paired(three, passes) / num_items * 1e6,
        "three_stages_traced_us": _paired(partial(three, traced=True), passes) / num_items * 1e6,
    }


def _paired(run: Callable[..., float], passes: int, *, share: bool = False) -> float:
    """Return how much longer a pass takes with statistics, in seconds or as a share: the median."""
    run(stats=True)  # warm up
    longer = []
    for number in range(passes):
        first = number % 2 == 0  # neither always comes second
        seconds = {stats: run(stats=stats) for stats in (first, not first)}
        difference = seconds[True] - seconds[False]
        longer.append(difference / seconds[False] if share else difference)
    return median(longer)


def _photograph_pass(paths: Sequence[str], *, stats: bool) -> float:
    """Return the seconds of an epoch without training, so that loading is all there is."""
    from spdl_torch import DataLoader

    dataset: Any = Photographs(paths, load_ours, crop=False)
    loader: Any = DataLoader(dataset, batch_size=32, num_workers=2, stats=stats)
    start = time.perf_counter()
    count = sum(len(batch) for batch in loader)
    seconds = time.perf_counter() - start
    assert count == len(paths), f"{count=}"
    return seconds


def _trivial_pass(
    num_items: int, *, stages: int, concurrency: int, stats: bool, traced: bool = False
) -> float:
    """Return the seconds from the first item to the last."""
    from spdl_torch.observe import tracing
    from spdl_torch.pipeline import PipelineBuilder

    builder: Any = PipelineBuilder().add_source(range(num_items + 1))
    for _ in range(stages):
        builder.pipe(abs, concurrency=concurrency)
    pipeline = builder.add_sink(64).build(stats=stats)
    with contextlib.ExitStack() as stack:
        if traced and stats:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            stack.enter_context(tracing(Path(folder) / "run.json"))
        stack.enter_context(pipeline.auto_stop())
        items = iter(pipeline)
        next(items)
        start = time.perf_counter()
        count = sum(1 for _ in items)
        seconds = time.perf_counter() - start
    assert count == num_items, f"{count=}"
    return seconds


_goal = partial(Goal, row=_ROW)
TABLES = {
    "overhead": Table(
        name="overhead",
        title="What it costs to be watched",
        metrics=METRICS,
        contenders=(Contender(name=_ROW, run=_watched, smoke=True),),
        prepare=_prepare,
        measure=measure,
        goals=(
            _goal(metric="photographs_percent", at_most=1.0),
            _goal(metric="one_stage_us", at_most=1.5),
            _goal(metric="three_stages_us", at_most=3 * 1.5),
        ),
        passes=15,
    )
}
