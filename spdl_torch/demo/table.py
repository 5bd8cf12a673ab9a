"""The tables that the demo ends with, for a plain terminal of 100 columns and for a page."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from .jobs import VARIANTS, Measurement
from .verdict import rate_of, wait_at

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

_Figure = tuple[str, str, "Callable[[Measurement], float | Sequence[float] | None]", float, str]

_FIGURES: tuple[_Figure, ...] = (
    ("loading alone", "images/s", lambda m: m.loading_images_per_second, 1, "higher"),
    ("training light network", "images/s", lambda m: m.light.epochs, 1, "higher"),
    ("  waiting for data", "% of time", lambda m: m.light.wait_ratio, 100, "lower"),
    ("training resnet18", "images/s", lambda m: m.resnet.epochs, 1, "higher"),
    ("  waiting for data", "% of time", lambda m: m.resnet.wait_ratio, 100, "lower"),
    ("time to first batch", "ms", lambda m: m.first_batch_seconds, 1e3, "lower"),
    ("CPU time, loading alone", "ms/image", lambda m: m.loading_cpu_seconds, 1e3, "lower"),
    ("memory, all processes", "MiB, peak", lambda m: m.peak_bytes, 2**-20, "lower"),
    ("other programs", "cores", lambda m: m.other_cores, 1, ""),
)
"""Name, unit, where it is (several: of each epoch), factor from the measurement to the unit, which
way is better; a value that does not depend on the loader has no better, and no ratio."""

_LABEL, _UNIT, _CELL, _RATIO, _BETTER = 24, 10, 14, 8, 7


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One value for every variant measured."""

    name: str
    unit: str
    cells: tuple[str, ...]
    ratios: tuple[str, ...]
    """The ratio of every further cell to the first; "" = none."""
    better: str


def comparison_rows(results: Mapping[str, Sequence[Measurement]]) -> list[Row]:
    """Return a row for every value, a cell for each variant in ``results``: the median of its
    rounds, of training of its epochs.

    ``±`` is half the difference between the best and the worst; a ratio is the median of those of
    the rounds one by one.
    """
    rows = []
    for name, unit, value_of, factor, better in _FIGURES:
        rounds = [_values(map(value_of, results[key])) for key in results]
        cells = tuple(_cell([v * factor for v in values]) for values in rounds)
        ratios = tuple(_ratio(rounds[0], each) if better else "" for each in rounds[1:])
        rows.append(Row(name=name, unit=unit, cells=cells, ratios=ratios, better=better))
    return rows


def comparison_table(
    results: Mapping[str, Sequence[Measurement]], *, with_ratio: bool = True
) -> str:
    """Return the rows as a table; each ratio is a further column over the first."""
    with_ratio = with_ratio and len(results) > 1
    lines = _headings(list(results), with_ratio)
    for row in comparison_rows(results):
        line = f"{row.name:{_LABEL}}{row.unit:{_UNIT}}"
        line += "".join(f"{cell:>{_CELL}}" for cell in row.cells)
        if with_ratio:
            line += "".join(f"{ratio:>{_RATIO}}" for ratio in row.ratios)
            line += f"{row.better:>{_BETTER}}"
        lines.append(line)
    return "\n".join(lines)


def over_what(num_columns: int) -> tuple[str, ...]:
    """Return ``2nd/1st``, ``3rd/1st``: the columns that each ratio compares."""
    return tuple(f"{each}/1st" for each in ("2nd", "3rd")[: num_columns - 1])


def _headings(measured: Sequence[str], with_ratio: bool) -> list[str]:
    lines = []
    over = over_what(len(measured))
    for row, extra in enumerate(((("ratio",) * len(over), "better"), (over, "is"))):
        line = " " * (_LABEL + _UNIT)
        line += "".join(f"{VARIANTS[key].heading[row]:>{_CELL}}" for key in measured)
        if with_ratio:
            line += "".join(f"{each:>{_RATIO}}" for each in extra[0]) + f"{extra[1]:>{_BETTER}}"
        lines.append(line)
    return [*lines, "-" * len(lines[0])]


def _cell(values: Sequence[float]) -> str:
    """Return ``640 ±12``; the spread only when there is one."""
    if not values:
        return "n/a"
    digits = 0 if median(values) >= 100 else 1
    text = f"{median(values):.{digits}f}"
    if len(values) > 1:
        text += f" ±{(max(values) - min(values)) / 2:.{digits}f}"
    return text


def _values(found: Iterable[float | Sequence[float] | None]) -> list[float]:
    """Return the values that there are, those of all epochs in one list."""
    values: list[float] = []
    for each in found:
        if isinstance(each, int | float):
            values.append(each)
        elif each is not None:
            values += each
    return values


def _ratio(before: Sequence[float], after: Sequence[float]) -> str:
    """Return the median of the pairs' ratios."""
    pairs = [ours / theirs for theirs, ours in zip(before, after, strict=False) if theirs]
    return f"{median(pairs):.2f}x" if pairs else ""


_MOST_SPEEDS = 5
_NAME, _RATE, _SPEED = 27, 11, 12


def model_speeds(rates: Sequence[float]) -> list[int]:
    """Return round speeds from below the slowest loader's rate to well above the fastest one's.

    ``rates=[410, 960] -> 200 500 1000 2000``.
    """
    least, most = min(rates) / 2.5, max(rates) * 5
    series = (digit * 10**power for power in range(9) for digit in (1, 2, 5))
    return [speed for speed in series if least <= speed <= most][-_MOST_SPEEDS:]


def waiting_table(results: Mapping[str, Sequence[Measurement]]) -> str:
    """Return a line for each variant: above which speed a model waits for it, and how much at
    others."""
    rates = {key: rate_of(rounds) for key, rounds in results.items()}
    speeds = model_speeds(list(rates.values()))
    line = f"{'':{_NAME}}{'N':>{_RATE}}"
    line += "".join(f"{f'at {speed:,}/s':>{_SPEED}}" for speed in speeds)
    lines = ["A model faster than N images/s waits for its loader, this part of its time:", line]
    lines.append("-" * len(line))
    for key, rate in rates.items():
        line = f"{VARIANTS[key].name:{_NAME}}{f'{rate:,.0f}':>{_RATE}}"
        shares = (f"{100 * wait_at(speed, rate):.0f} %" for speed in speeds)
        lines.append(line + "".join(f"{share:>{_SPEED}}" for share in shares))
    return "\n".join(lines)
