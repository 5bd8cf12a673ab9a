"""The measurements: rows (a contender), metrics (images a second), one value per round."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_ERROR = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Failure|Iteration)\b")


@dataclass(frozen=True, slots=True)
class Metric:
    """One column of the table."""

    key: str
    heading: str
    """With the unit."""
    digits: int = 0
    has_spread: bool = True
    """Whether the text shows the smallest and the largest value beside the median."""
    loss_below: float | None = None
    """Medians below it are marked ``loss``, or ``LOSS`` where every round is below it."""


@dataclass(frozen=True, slots=True)
class Goal:
    """A value to reach: the metric of ``row``, or its ratio to the same metric of ``over``."""

    metric: str
    row: str
    over: str | None = None
    at_least: float | None = None
    at_most: float | None = None

    @property
    def name(self) -> str:
        """What is compared."""
        return f"{self.metric}: {self.row}" + (f" / {self.over}" if self.over else "")

    def bound(self) -> str:
        """Return the goal in words; empty where the value is only shown."""
        if self.at_least is not None:
            return f">= {self.at_least:g}"
        return "" if self.at_most is None else f"<= {self.at_most:.3g}"

    def is_reached(self, value: float) -> bool | None:
        """Return whether the goal is reached; None where there is nothing to reach."""
        if self.at_least is not None:
            return value >= self.at_least
        return None if self.at_most is None else value <= self.at_most


@dataclass(kw_only=True, slots=True)
class Report:
    """Everything that a table shows."""

    title: str
    metrics: Sequence[Metric]
    settings: Mapping[str, object]
    rows: dict[str, dict[str, dict[int, float]]] = field(default_factory=dict)
    """Values by row, metric and round: a round that failed has none."""
    goals: list[Goal] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    """Rows that could not be measured, and why."""
    shows_goals: bool = True
    """Whether the text has them and marks losses; the JSON always has the goals."""
    peer: str | None = None
    """The row whose first metric the others are divided by, in a column of its own."""

    def add(self, row: str, values: Mapping[str, float], number: int) -> None:
        """Add the values of round ``number``."""
        series = self.rows.setdefault(row, {})
        for key, value in values.items():
            series.setdefault(key, {})[number] = value

    def median(self, row: str, metric: str) -> float:
        """Return the median over the rounds."""
        return median(self.rows[row][metric].values())

    def values_of(self, goal: Goal) -> list[float]:
        """Return one value per round; empty if a row of the goal was not measured."""
        values = self.rows.get(goal.row, {}).get(goal.metric, {})
        if goal.over is None:
            return list(values.values())
        return ratios(values, self.rows.get(goal.over, {}).get(goal.metric, {}))

    def text(self) -> str:
        """Return the table, for people."""
        settings = ", ".join(f"{key} {value}" for key, value in self.settings.items())
        lines = [self.title, settings, "", *self._table_lines(), ""]
        if self.shows_goals:
            lines += [self._goal_line(goal) for goal in self.goals if self.values_of(goal)]
        return "\n".join([*lines, *self.remarks])

    def as_json(self) -> dict[str, object]:
        """Return the same for programs, with the values of every round."""
        return {
            "title": self.title,
            "settings": dict(self.settings),
            "metrics": {metric.key: metric.heading for metric in self.metrics},
            "rows": {
                row: {key: _summary(values.values()) for key, values in series.items()}
                for row, series in self.rows.items()
            },
            "ratios": [
                {
                    "name": goal.name,
                    **_summary(values),
                    "goal": goal.bound() or None,
                    "reached": goal.is_reached(median(values)),
                }
                for goal in self.goals
                if (values := self.values_of(goal))
            ],
            "failures": self.failures,
            "remarks": self.remarks,
        }

    def _table_lines(self) -> list[str]:
        rows = self.rows.values()
        metrics = [m for m in self.metrics if any(series.get(m.key) for series in rows)]
        cells = [["", *(metric.heading for metric in metrics)]]
        for row, series in self.rows.items():
            cells.append(
                [row, *(self._cell([*series.get(m.key, {}).values()], m) for m in metrics)]
            )
        if self.peer in self.rows:
            first = [series.get(metrics[0].key, {}) for series in rows]
            peer = self.rows[self.peer].get(metrics[0].key, {})
            column = [f"x {self.peer}", *(cell(ratios(each, peer), 2) for each in first)]
            cells = [[*line, text] for line, text in zip(cells, column, strict=True)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        widths[0] = max([widths[0], *map(len, self.failures)])
        lines = [
            "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])])
            for line in cells
        ]
        failed = [
            f"{row.ljust(widths[0])}  failed: {last_line(why)}"
            for row, why in self.failures.items()
        ]
        return [lines[0], "-" * len(lines[0]), *lines[1:], *failed]

    def _cell(self, values: list[float], metric: Metric) -> str:
        text = cell(values if metric.has_spread else values and [median(values)], metric.digits)
        least = metric.loss_below if self.shows_goals else None
        if least is None or not values or median(values) >= least:
            return text
        return f"{'LOSS' if max(values) < least else 'loss'} {text}"

    def _goal_line(self, goal: Goal) -> str:
        values = self.values_of(goal)
        middle = median(values)
        text = f"{goal.name:<78} {cell(values, 2 if middle >= 1 else 3)}"
        reached = goal.is_reached(middle)
        if reached is not None:
            text += f"  goal {goal.bound()}: {'reached' if reached else 'MISSED'}"
        return text


def ratios(series: Mapping[int, float], others: Mapping[int, float]) -> list[float]:
    """Return one value over the other for each round (the keys) that has both.

    Rounds in which the other is 0 have no ratio.
    """
    return [value / others[number] for number, value in series.items() if others.get(number)]


def cell(values: list[float], digits: int) -> str:
    """Return the median, and the spread if there is one."""
    if not values:
        return "-"
    text = f"{median(values):,.{digits}f}"
    if len(values) > 1:
        text += f" ({min(values):,.{digits}f}..{max(values):,.{digits}f})"
    return text


def last_line(text: str) -> str:
    """Return the last line of a failed process's messages that names an error, else the last."""
    lines = text.strip().splitlines() or ["no reason given"]
    errors = [line for line in lines if _ERROR.match(line)]
    return (errors or lines)[-1].strip()


def _summary(values: Iterable[float]) -> dict[str, object]:
    found = list(values)
    return {"median": median(found), "min": min(found), "max": max(found), "values": found}
