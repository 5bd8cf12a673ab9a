"""Medians, spreads, ratios within rounds, and a law that predicts larger sizes."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["Scalability", "Summary", "fit_scalability", "ratios", "summarize"]


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


@dataclass(frozen=True, slots=True)
class Scalability:
    """Throughput of ``n`` threads: ``rate * n / (1 + contention (n - 1) + crosstalk n (n - 1))``.

    The universal scalability law: ``contention`` is the share of the work that is done one at a
    time, ``crosstalk`` what each pair of threads costs by waiting for each other.
    """

    rate: float
    """Items a second of one thread."""
    contention: float
    crosstalk: float

    def __call__(self, count: float) -> float:
        """Return the items a second with ``count`` threads."""
        others = count - 1
        return self.rate * count / (1 + self.contention * others + self.crosstalk * count * others)


def fit_scalability(points: Sequence[tuple[float, float]]) -> Scalability:
    """Return the law that is nearest to ``(threads, items a second)``, least squares of relative
    errors.

    In ``count / throughput`` the law is linear in three unknowns that cannot be negative; every
    choice of which of them are 0 is tried, and the best is taken.

    Raises: ValueError: fewer than two points, or one that is not positive.
    """
    if len(points) < 2 or any(count <= 0 or rate <= 0 for count, rate in points):
        raise ValueError(f"fit_scalability: two positive points or more are needed, got {points}.")
    best: tuple[float, tuple[float, ...]] | None = None
    for used in ((0,), (0, 1), (0, 2), (0, 1, 2)):
        if len(used) > len(points):
            continue
        solution = _least_squares(points, used)
        if solution is None or any(x < 0 for x in solution) or solution[0] <= 0:
            continue
        error = _error(points, solution)
        if best is None or error < best[0] - 1e-15:
            best = error, solution
    assert best is not None, "guaranteed by the choice (0,): a mean of positive numbers"
    base, first, second = best[1]
    return Scalability(1 / base, first / base, second / base)


def _terms(count: float) -> tuple[float, float, float]:
    return 1.0, count - 1, count * (count - 1)


def _least_squares(
    points: Sequence[tuple[float, float]], used: tuple[int, ...]
) -> tuple[float, ...] | None:
    """Return the coefficients of the terms of ``count / throughput``; None: undetermined."""
    # Each equation divided by its right side, so that errors are relative.
    rows = [[_terms(n)[k] * rate / n for k in used] for n, rate in points]
    size = len(used)
    system = [
        [sum(row[i] * row[j] for row in rows) for j in range(size)] + [sum(row[i] for row in rows)]
        for i in range(size)
    ]
    for i in range(size):
        pivot = max(range(i, size), key=lambda r: abs(system[r][i]))
        if abs(system[pivot][i]) < 1e-12:
            return None
        system[i], system[pivot] = system[pivot], system[i]
        for r in range(size):
            if r != i:
                factor = system[r][i] / system[i][i]
                system[r] = [a - factor * b for a, b in zip(system[r], system[i], strict=True)]
    solution = [0.0, 0.0, 0.0]
    for i, k in enumerate(used):
        solution[k] = system[i][size] / system[i][i]
    return tuple(solution)


def _error(points: Sequence[tuple[float, float]], solution: tuple[float, ...]) -> float:
    return sum(
        (sum(c * t for c, t in zip(solution, _terms(n), strict=True)) * rate / n - 1) ** 2
        for n, rate in points
    )
