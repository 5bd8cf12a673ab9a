"""Loaders with known limits, and real ones, before and after changes, for the table ``what-if``."""

from __future__ import annotations

import time
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

import spdl_torch
from spdl_torch.data import cached

from .ordinary.catalogue import ORDINARY

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from spdl_torch.observe import Report

_MANY = 1_000_000
_LONG_SECONDS = 10
_CACHED = 256
_COMPRESSED = bytes(range(256)) * 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Synthetic:
    """A dataset whose samples wait, compute without the GIL, and compute with it, for known times;
    safe on threads."""

    thread_safe = True
    sleep_seconds: float = 0.0
    compressions: int = 0
    """Calls of zlib, about 0.2 ms each: C code that releases the GIL."""
    python_loops: int = 0
    """Iterations of a loop in pure Python, about 0.03 µs each."""
    floats: int = 16
    length: int = _MANY

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        """Return float32, shape (floats,)."""
        if self.sleep_seconds:
            time.sleep(self.sleep_seconds)
        for _ in range(self.compressions):
            zlib.compress(_COMPRESSED, 6)
        total = 0
        for number in range(self.python_loops):
            total += number * number
        return torch.zeros(self.floats)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A loader, and the settings that are predicted from a run of it."""

    question: Mapping[str, Any]
    """Arguments of ``Report.what_if``."""
    dataset: Synthetic | str
    """A string is the name of one of ``ordinary``'s."""
    arguments: Mapping[str, Any]
    """The arguments of the ``DataLoader`` that is measured first."""
    changed: Mapping[str, Any] = field(default_factory=dict)
    """The arguments that differ in the loader that is predicted."""
    step_seconds: float = 0.0
    """The duration of a training step on a device, which uses no core."""


def run(case: Case, folder: Path, seconds: float, *, as_changed: bool) -> tuple[Report, float]:
    """Load for ``seconds``; return the report, and batches a second from the first one on."""
    loader = _loader(case, folder, as_changed)
    moments: list[float] = []
    for _ in loader:
        moments.append(time.perf_counter())
        if moments[-1] - moments[0] >= seconds:
            break
        if case.step_seconds:
            time.sleep(case.step_seconds)
    report = loader.report()
    return report, (len(moments) - 1) / (moments[-1] - moments[0])


def _loader(case: Case, folder: Path, as_changed: bool) -> Any:
    options = dict(case.arguments)
    if isinstance(case.dataset, str):
        ordinary = next(each for each in ORDINARY if each.name == case.dataset)
        # For those that load fast, enough that they do not run out.
        count = max(_MANY // 20, int(_LONG_SECONDS * ordinary.per_second))
        options = {**ordinary.arguments(folder, count), **options}
        options.setdefault("batch_size", ordinary.batch_size)
    else:
        options["dataset"] = case.dataset
    if as_changed:
        options.update(case.changed)
        speedup = case.question.get("read_speedup", 1.0)
        if isinstance(case.dataset, Synthetic) and speedup != 1:
            options["dataset"] = _faster(case.dataset, speedup)
        if case.question.get("cache"):
            options["dataset"] = _filled(options["dataset"])
    return spdl_torch.DataLoader(**options)


def _faster(dataset: Synthetic, speedup: float) -> Synthetic:
    return Synthetic(
        sleep_seconds=dataset.sleep_seconds / speedup,
        compressions=dataset.compressions,
        python_loops=dataset.python_loops,
        floats=dataset.floats,
    )


def _filled(dataset: Any) -> Any:
    """Return the first samples of the dataset from a cache, again and again."""
    kept = cached(torch.utils.data.Subset(dataset, range(_CACHED)))
    for index in range(_CACHED):
        kept[index]
    return torch.utils.data.Subset(kept, [index % _CACHED for index in range(_MANY // 10)])
