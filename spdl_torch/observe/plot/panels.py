"""The panels, and the values that each shows for an interval."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..store.interval_rows import milliseconds_of, rate_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..store.interval_rows import Row


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

    @property
    def label(self) -> str:
        """The label of the y axis."""
        return f"{self.quantity}\n({self.unit})"


def _rate(column: str) -> tuple[Curve, ...]:
    return (Curve("mean", rate_of(column)),)


def _times(column: str) -> tuple[Curve, ...]:
    """Return mean, p90 and p99 in ms."""
    kinds = {"mean": "ave", "p90": "p90", "p99": "p99"}
    return tuple(
        Curve(kind, milliseconds_of(f"{prefix}_{column}")) for kind, prefix in kinds.items()
    )


TASK_PANELS = (
    Panel(quantity="tasks", unit="1/s", curves=_rate("num_tasks")),
    Panel(quantity="failures", unit="1/s", curves=_rate("num_failures")),
    Panel(quantity="task time", unit="ms", curves=_times("time")),
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
        curves=_times("put_time"),
    ),
    Panel(
        quantity="get: wait for an item",
        unit="ms",
        curves=_times("get_time"),
    ),
)
