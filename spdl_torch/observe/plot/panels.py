"""The panels, and the values that each shows for an interval."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Curve:
    """One line for each stage."""

    kind: str
    """``mean``, ``p90`` or ``p99``, which decides the style of the line."""
    value: Callable[[Row], float]
    """The value in the panel's unit; NaN where the interval has none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """One pair of axes."""

    quantity: str
    unit: str
    curves: tuple[Curve, ...]
    is_percentage: bool = False
    """Whether the axis always runs from 0 to 100."""
    is_latency: bool = False
    """Whether the scale becomes logarithmic when the values span more than two decades."""

    @property
    def label(self) -> str:
        """The label of the y axis."""
        return f"{self.quantity}\n({self.unit})"


def _rate(column: str) -> tuple[Curve, ...]:
    """Return the count over the interval's length: intervals differ, and the last one is short."""

    def value(row: Row) -> float:
        return float(row[column] / row["elapsed"]) if row["elapsed"] else math.nan

    return (Curve("mean", value),)


def _times(column: str, count: Callable[[Row], int]) -> tuple[Curve, ...]:
    """Return mean, p90 and p99 in ms; none for an interval in which nothing happened."""

    def curve(kind: str, prefix: str) -> Curve:
        name = f"{prefix}_{column}"
        return Curve(kind, lambda row: 1e3 * row[name] if count(row) else math.nan)

    return curve("mean", "ave"), curve("p90", "p90"), curve("p99", "p99")


def _num_successes(row: Row) -> int:
    return int(row["num_tasks"] - row["num_failures"])


def _num_items(row: Row) -> int:
    return int(row["num_items"])


TASK_PANELS = (
    Panel(quantity="tasks", unit="1/s", curves=_rate("num_tasks")),
    Panel(quantity="failures", unit="1/s", curves=_rate("num_failures")),
    Panel(quantity="task time", unit="ms", curves=_times("time", _num_successes), is_latency=True),
)

QUEUE_PANELS = (
    Panel(quantity="throughput (QPS)", unit="items/s", curves=_rate("num_items")),
    Panel(
        quantity="occupancy",
        unit="% of the time",
        curves=(Curve("mean", lambda row: 100.0 * row["occupancy_rate"]),),
        is_percentage=True,
    ),
    Panel(
        quantity="put: wait for room",
        unit="ms",
        curves=_times("put_time", _num_items),
        is_latency=True,
    ),
    Panel(
        quantity="get: wait for an item",
        unit="ms",
        curves=_times("get_time", _num_items),
        is_latency=True,
    ),
)
