"""Medians and spreads over rounds, ratios within them."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


@dataclass(frozen=True, slots=True)
class Summary:
    """Median and spread of the values of several rounds."""

    median: float
    smallest: float
    largest: float


def summarize(values: Iterable[float]) -> Summary:
    """Summarize the values. Raises: statistics.StatisticsError: there are none."""
    found = list(values)
    return Summary(median(found), min(found), max(found))


def ratios(series: Mapping[int, float], others: Mapping[int, float]) -> list[float]:
    """Return one value over the other for each round (the keys) that has both, in order.

    Rounds in which the other is 0 have no ratio.
    """
    common = sorted(series.keys() & others.keys())
    return [series[number] / others[number] for number in common if others[number] != 0]
