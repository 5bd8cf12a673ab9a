"""``plans``: what mixtures and packs cost besides loading: the order of samples, and the packing.

The documents' lengths are distributed like those of web text: log-normal, half of them below 400
tokens, and none longer than a pack, as a tokenizer truncates them.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .report import Goal, Metric
from .tables import Contender, Table

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ..measuring.reporter import Reporter
    from .tables import BenchOptions

__all__ = ["TABLES"]

_BUDGET = 8192
_MEDIAN_TOKENS, _SIGMA = 400, 1.2
_PACKING = f"Documents in packs of {_BUDGET} tokens"
_METRICS = (
    Metric(
        key="us", heading="mixture of 4 sources, CPU µs/sample", digits=2, higher_is_better=False
    ),
    Metric(
        key="waste_percent", heading="waste, %", digits=2, higher_is_better=False, section=_PACKING
    ),
    Metric(
        key="plan_seconds",
        heading="plan, CPU s",
        digits=2,
        higher_is_better=False,
        section=_PACKING,
    ),
    Metric(
        key="bytes", heading="bytes/document", digits=1, higher_is_better=False, section=_PACKING
    ),
)


def in_order(settings: dict[str, Any]) -> dict[str, float]:
    """Look up every position of an epoch, in order."""
    return _mixture_cost(range(settings["samples"]))


def in_any_order(settings: dict[str, Any]) -> dict[str, float]:
    """Look up every position of an epoch, shuffled."""
    import torch

    order = torch.randperm(settings["samples"], generator=torch.Generator().manual_seed(0))
    return _mixture_cost(order.tolist())


def packing(settings: dict[str, Any]) -> dict[str, float]:
    """Measure the plan of an epoch of packs."""
    import numpy as np

    from spdl_torch.data import pack

    count = settings["documents"]
    drawn = np.random.default_rng(0).lognormal(np.log(_MEDIAN_TOKENS), _SIGMA, count)
    sizes = np.clip(drawn, 1, _BUDGET).astype(np.int32)
    del drawn

    def plan(sizes: Any) -> Any:
        packed: Any = pack(range(len(sizes)), _BUDGET, size_of=sizes)
        packed.plan().groups(0)
        return packed

    plan(sizes[:1000])  # what is imported and allocated once
    before = _begin_peak()
    start = time.process_time()
    packed = plan(sizes)
    seconds = time.process_time() - start
    figures = {"waste_percent": 100 * packed.waste(), "plan_seconds": seconds}
    peak = _peak_bytes()
    if before and peak:
        # The sizes themselves are the user's.
        figures["bytes"] = (peak - before + sizes.nbytes) / count
    return figures


def _mixture_cost(order: Iterable[int]) -> dict[str, float]:
    from spdl_torch.data import mix

    sources = {name: range(250_000) for name in "abcd"}
    weights = {"a": 4, "b": 3, "c": 2, "d": 1}
    mixture: Any = mix(sources, weights, stop="never", num_samples=1_000_000)
    names, indices = zip(*map(mixture.locate, range(1000)), strict=True)  # imports, first calls
    number = 0
    start = time.process_time()
    for position in order:
        mixture[position]
        number += 1
    seconds = time.process_time() - start
    # Looking up a range that serves as a source takes time of its own, which is not the plan's.
    looks = [(sources[name], index) for name, index in zip(names, indices, strict=True)]
    start = time.process_time()
    for source, index in looks:
        source[index]
    own = (time.process_time() - start) / len(looks)
    return {"us": (seconds / number - own) * 1e6}


def _begin_peak() -> int | None:
    """Start measuring this process's peak memory, and return what it has now; None = this system
    does not say."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    return _status("VmRSS")


def _peak_bytes() -> int | None:
    return _status("VmHWM")


def _status(name: str) -> int | None:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return None


def measure(contender: Contender, settings: dict[str, Any], reporter: Reporter) -> dict[str, float]:
    """Measure one plan."""
    reporter.phase("measuring", 0)
    figures: dict[str, float] = contender.run(settings)
    return figures


@contextlib.contextmanager
def _prepare(options: BenchOptions) -> Iterator[dict[str, Any]]:
    count = 2000 if options.smoke else 1_000_000
    yield {"samples": count, "documents": count}


TABLES = {
    "plans": Table(
        name="plans",
        title="The plans of mixtures and packs",
        metrics=_METRICS,
        contenders=(
            Contender(name="ours, mixture in order", run=in_order, smoke=True),
            Contender(name="ours, mixture in any order", run=in_any_order, smoke=True),
            Contender(name="ours, packing", run=packing, smoke=True),
        ),
        prepare=_prepare,
        measure=measure,
        goals=(
            Goal(metric="us", row="ours, mixture in order", at_most=2),
            Goal(metric="us", row="ours, mixture in any order", at_most=2),
            Goal(metric="waste_percent", row="ours, packing", at_most=1),
            Goal(metric="plan_seconds", row="ours, packing", at_most=2),
            Goal(metric="bytes", row="ours, packing", at_most=16),
        ),
    )
}
