"""``autotune``: how near tuning while running comes to the best of a grid of fixed concurrencies.

Six pipelines whose stages wait, compute or hold the GIL in known ways, and three programs that
decode: photographs in a pipeline and in a DataLoader, and clips of videos. Every point of the grid
runs for a window; then the tuner starts with one thread per stage and has 15 windows. Last, the
best point of the grid and what the tuner ended with take turns, which gives the fraction.
"""

from __future__ import annotations

import contextlib
from statistics import median
from typing import TYPE_CHECKING, Any

from .images import jpegs, photographs
from .report import Goal, Metric
from .tables import Contender, Table
from .tuned_programs import MOST_THREADS, REAL, SYNTHETIC, program
from .videos import videos

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..measuring.reporter import Reporter
    from .tables import BenchOptions

__all__ = ["TABLES"]

_WIDTHS = (1, 2, 3, 4, 6, 8, 12)
_MOST_WINDOWS = 15
_TURNS = 3
METRICS = (
    Metric(key="start", heading="one thread each, items/s"),
    Metric(key="grid", heading="best of the grid, items/s"),
    Metric(key="auto", heading="tuned, items/s"),
    Metric(key="fraction", heading="tuned / grid", digits=2),
    Metric(key="windows", heading="windows", higher_is_better=False),
)


@contextlib.contextmanager
def _prepare(options: BenchOptions) -> Iterator[dict[str, Any]]:
    short = options.smoke
    with (
        photographs(options.data, 16 if short else 200) as folder,
        contextlib.nullcontext() if short else videos(None) as clips,  # no short run decodes one
    ):
        yield {
            "folder": str(folder),
            "files": len(jpegs(folder)),
            "videos": str(clips),
            "most_threads": MOST_THREADS,
            "widths": _WIDTHS[: 2 if short else None],
            "most_windows": 2 if short else _MOST_WINDOWS,
            "window_seconds": 0.1 if short else 0.3 * options.seconds,
            "turns": 1 if short else _TURNS,
        }


def measure(contender: Contender, settings: dict[str, Any], reporter: Reporter) -> dict[str, float]:
    """Measure the grid, then the tuner, then both in turns."""
    name, seconds = contender.arguments["program"], settings["window_seconds"]
    one = contender.run(name, settings["folder"], settings["videos"])
    points = one.grid(tuple(settings["widths"]))
    reporter.phase("grid", len(points))
    rates = []
    for number, point in enumerate(points, 1):
        rates.append(one.rate(point, seconds))
        reporter.done(number)
    best = points[max(range(len(points)), key=rates.__getitem__)]
    reporter.phase("tuning", 0)
    found, windows = one.tuned(seconds, settings["most_windows"])
    pairs = [(one.rate(best, seconds), one.rate(found, seconds)) for _ in range(settings["turns"])]
    return {
        "start": rates[0],
        "grid": median(grid for grid, _ in pairs),
        "auto": median(auto for _, auto in pairs),
        "fraction": median(auto / grid for grid, auto in pairs),
        "windows": windows,
    }


def _contender(name: str) -> Contender:
    smoke = name in ("short tasks", "photographs, DataLoader")
    return Contender(name=f"ours, {name}", run=program, arguments={"program": name}, smoke=smoke)


def _goals(row: str) -> tuple[Goal, Goal]:
    return (
        Goal(metric="fraction", row=row, at_least=0.95),
        Goal(metric="windows", row=row, at_most=_MOST_WINDOWS),
    )


_CONTENDERS = tuple(map(_contender, (*SYNTHETIC, *REAL)))
TABLES = {
    "autotune": Table(
        name="autotune",
        title="Tuning while running, against every point of a grid",
        metrics=METRICS,
        contenders=_CONTENDERS,
        prepare=_prepare,
        measure=measure,
        goals=tuple(goal for one in _CONTENDERS for goal in _goals(one.name)),
        passes=20,
    )
}
