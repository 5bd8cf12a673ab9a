"""The lines about losses: rows whose ratio to torch's loader is too low."""

from __future__ import annotations

from statistics import geometric_mean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .report import Report

LEAST_WITHOUT_WORKERS, LEAST = 0.97, 1.0
"""Ratios below these are losses. Without workers both loaders do the same in the loop's thread,
with noise of a few percent."""


def least_ratio(num_workers: int) -> float:
    """Return the ratio below which a row is a loss."""
    return LEAST if num_workers else LEAST_WITHOUT_WORKERS


def add_mean(report: Report, name: str, rows: Sequence[str], keys: Sequence[str]) -> None:
    """Add a row of geometric means over others, each round's by itself."""
    for key in keys:
        series = [report.rows[row][key] for row in rows]
        # A round that was interrupted has other rows than the others, so it has no mean.
        for number in sorted(set(series[0]).intersection(*series[1:])) if series else ():
            report.add(name, {key: geometric_mean(one[number] for one in series)}, number)


def losses(report: Report, rows: Sequence[str], key: str, least: float, where: str) -> str:
    """Return how many of the rows, and which, are losses."""
    found = sorted((report.median(row, key), row) for row in rows)
    below = [(value, row) for value, row in found if value < least]
    always = [row for _, row in below if max(report.rows[row][key].values()) < least]
    named = "; ".join(
        f"{row} {value:.2f}{' in every round' if row in always else ''}" for value, row in below
    )
    return (
        f"LOSSES {where}: {len(below)} of {len(rows)} medians are below {least:.2f}, "
        f"{len(always)} in every round{named and f': {named}'}."
    )
