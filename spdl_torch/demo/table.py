"""The tables that the demo ends with, for a plain terminal of 100 columns."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from .jobs import VARIANTS, Measurement, StageRow

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["comparison_table", "stage_table"]

_Figure = tuple[str, str, "Callable[[Measurement], float | None]", float, str]

_FIGURES: tuple[_Figure, ...] = (
    ("loading alone", "images/s", lambda m: m.loading_images_per_second, 1, "higher"),
    ("training resnet18", "images/s", lambda m: m.training_images_per_second, 1, "higher"),
    ("waiting for data", "% of training", lambda m: m.wait_ratio, 100, "lower"),
    ("time to first batch", "ms", lambda m: m.first_batch_seconds, 1e3, "lower"),
    ("CPU time, loading alone", "ms/image", lambda m: m.loading_cpu_seconds, 1e3, "lower"),
    ("CPU time, training", "ms/image", lambda m: m.training_cpu_seconds, 1e3, "lower"),
    ("memory, all processes", "MiB, peak", lambda m: m.peak_bytes, 2**-20, "lower"),
    ("other programs", "cores", lambda m: m.other_cores, 1, ""),
)
"""Name, unit, where it is, factor from the measurement to the unit, which way is better; a figure
that is not the loader's has no better, and no ratio."""

_LABEL, _UNIT, _CELL, _RATIO, _BETTER = 24, 14, 15, 9, 7


def comparison_table(
    results: Mapping[str, Sequence[Measurement]], *, with_ratio: bool = True
) -> str:
    """One line per figure, one column per variant measured: the median of its rounds.

    ``±`` is half the distance between the best and the worst round. The ratio is the last
    column over the first.
    """
    measured = [key for key in VARIANTS if results.get(key)]
    with_ratio = with_ratio and len(measured) > 1
    lines = _headings(measured, with_ratio)
    for name, unit, value_of, factor, better in _FIGURES:
        rounds = [[value_of(m) for m in results[key]] for key in measured]
        cells = [_cell([v * factor for v in values if v is not None]) for values in rounds]
        line = f"{name:{_LABEL}}{unit:{_UNIT}}" + "".join(f"{cell:>{_CELL}}" for cell in cells)
        if with_ratio:
            ratio = _ratio(rounds[0], rounds[-1]) if better else ""
            line += f"{ratio:>{_RATIO}}{better:>{_BETTER}}"
        lines.append(line)
    return "\n".join(lines)


def _headings(measured: Sequence[str], with_ratio: bool) -> list[str]:
    lines = []
    last_over_first = "3rd/1st" if len(measured) == 3 else "2nd/1st"
    for row, extra in enumerate((("ratio", "better"), (last_over_first, "is"))):
        line = " " * (_LABEL + _UNIT)
        line += "".join(f"{VARIANTS[key].heading[row]:>{_CELL}}" for key in measured)
        if with_ratio:
            line += f"{extra[0]:>{_RATIO}}{extra[1]:>{_BETTER}}"
        lines.append(line)
    return [*lines, "-" * len(lines[0])]


def _cell(values: Sequence[float]) -> str:
    """``640 ±12``; the spread only when there is one."""
    if not values:
        return "n/a"
    digits = 0 if median(values) >= 100 else 1
    text = f"{median(values):.{digits}f}"
    if len(values) > 1:
        text += f" ±{(max(values) - min(values)) / 2:.{digits}f}"
    return text


def _ratio(first: Sequence[float | None], last: Sequence[float | None]) -> str:
    before = [value for value in first if value is not None]
    after = [value for value in last if value is not None]
    if not before or not after or median(before) == 0:
        return ""
    return f"{median(after) / median(before):.2f}x"


_STAGE_HEADINGS = (
    ("", "stage"),
    ("", "threads"),
    ("", "calls"),
    ("busy", "%"),
    ("CPU of", "busy %"),
    ("waits", "in %"),
    ("waits", "out %"),
    ("mean", "ms"),
    ("p99", "ms"),
    ("calls", "/s"),
    ("at most", "/s"),
)


def stage_table(rows: Sequence[StageRow]) -> str:
    """One line per stage, in the order in which the data passes them."""
    cells = [
        (
            row.name,
            f"{row.concurrency}",
            f"{row.num_calls}",
            f"{100 * row.busy_ratio:.0f}",
            f"{100 * row.cpu_ratio:.0f}",
            f"{100 * row.wait_in_ratio:.0f}",
            f"{100 * row.wait_out_ratio:.0f}",
            f"{1e3 * row.mean_seconds:.2f}",
            f"{1e3 * row.p99_seconds:.2f}",
            f"{row.calls_per_second:.1f}",
            f"{row.capacity_per_second:.1f}",
        )
        for row in rows
    ]
    tops, bottoms = zip(*_STAGE_HEADINGS, strict=True)
    lines = [_stage_line(line) for line in (tops, bottoms, *cells)]
    return "\n".join([*lines[:2], "-" * len(lines[0]), *lines[2:]])


def _stage_line(cells: Sequence[str]) -> str:
    return f"{cells[0]:<18.18}" + "".join(f"{cell:>8}" for cell in cells[1:])
