"""The functions in which a batch and a sample spend time, without workers, in both loaders."""

from __future__ import annotations

import cProfile
import os
from typing import TYPE_CHECKING, Any

import torch.utils.data

import spdl_torch

from .fixed_costs import Constant, cost_of_sizes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..reporter import Reporter


_SMALL, _LARGE = 8, 128
_BATCHES_PER_SECOND = 500
_REPEATS = 5
_MOST_ROWS = 10
"""The functions of each loader that are shown: those that take most of a batch of 8."""


def profile(settings: Mapping[str, Any], reporter: Reporter) -> dict[str, Any]:
    """Profile both loaders without workers, over numbers that torch's collate function joins.

    Returns: under ``rows``, a row for each function, ``LOADER: FILE:FUNCTION``: calls per batch of
        8, and the µs per batch and per sample that pass in the function itself, fitted over batches
        of two sizes. The profiler's own cost is in them, so compare functions, not loaders.
    """
    torch.set_num_threads(1)
    batches = max(4, round(_BATCHES_PER_SECOND * settings["seconds"]))
    loaders: dict[str, Any] = {
        "torch": torch.utils.data.DataLoader,
        "ours": spdl_torch.DataLoader,
    }
    rows: dict[str, dict[str, float]] = {}
    reporter.phase("profiling", len(loaders))
    for number, (name, loader_class) in enumerate(loaders.items(), 1):
        small, large = (
            _functions(loader_class(Constant(size * batches), batch_size=size), batches)
            for size in (_SMALL, _LARGE)
        )
        longest = sorted(small, key=lambda function: small[function][1], reverse=True)
        for function in longest[:_MOST_ROWS]:
            calls, seconds = small[function]
            costs = {_SMALL: 1e6 * seconds, _LARGE: 1e6 * large.get(function, (0.0, 0.0))[1]}
            batch, sample = cost_of_sizes(costs)
            rows[f"{name}: {function}"] = {
                "calls": calls,
                "profiled_batch_us": batch,
                "profiled_sample_us": sample,
            }
        reporter.done(number)
    return {"rows": rows}


def _functions(loader: Any, batches: int) -> dict[str, tuple[float, float]]:
    """Return calls and seconds per batch for each function: the least of several epochs, since
    other programs only add to it.
    """
    for _ in loader:  # what the loader learns in its first epoch
        pass
    epochs = [_functions_of_epoch(loader, batches) for _ in range(_REPEATS)]
    return {
        name: min(epoch.get(name, each) for epoch in epochs) for name, each in epochs[0].items()
    }


def _functions_of_epoch(loader: Any, batches: int) -> dict[str, tuple[float, float]]:
    iterator = iter(loader)
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in iterator:
        pass
    profiler.disable()
    found: dict[str, tuple[float, float]] = {}
    for entry in profiler.getstats():
        name = _name(entry.code)
        calls, seconds = found.get(name, (0.0, 0.0))
        found[name] = calls + entry.callcount / batches, seconds + entry.inlinetime / batches
    return found


def _name(code: Any) -> str:
    """Return ``file:function``; for a function in C, the profiler's description."""
    if isinstance(code, str):
        return code.strip("<>")
    return f"{os.path.basename(code.co_filename)}:{code.co_name}"
