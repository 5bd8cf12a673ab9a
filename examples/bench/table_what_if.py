"""``what-if``: the bound that a report gives for other settings, beside what is then measured.

A row is a loader and a question: six datasets whose samples wait and compute for known times, and
three as people write them. A round runs the loader as it is, asks its report, and runs the loader
with the settings in question, both for ``--seconds``, three times in turns; the medians count.
"""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from .report import Goal, Metric
from .tables import Contender, Refused, Table

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from .report import Report
    from .reporter import Reporter
    from .tables import BenchOptions

_MOST = 1.05
"""The largest part of the bound that may be measured: the rest is noise."""
_TURNS = 3
_QUIET_CORES = 0.2
"""Cores that other programs may use: the report's predictions hold for the cores that are left."""

_ON_THREADS = {"isolation": "thread"}
_SLEEPS, _PYTHON = {"sleep_seconds": 2e-3}, {"python_loops": 10_000}
_COMPUTES = {"compressions": 3}
_MIXED = {"sleep_seconds": 2e-3, "compressions": 2}
_READS = {"sleep_seconds": 2e-3, "compressions": 2, "floats": 2048}

# Row: dataset, batch size, workers, question, further arguments of both loaders, step in seconds.
_ROWS: dict[str, tuple[dict[str, Any] | str, int | None, int, dict[str, Any], float]] = {
    "waiting, 2 -> 8 workers": (_SLEEPS, 8, 2, {"num_workers": 8}, 0.0),
    "waiting, reads 2x as fast": (_SLEEPS, 8, 4, {"read_speedup": 2.0}, 0.0),
    "GIL, 2 -> 4 workers": (_PYTHON, 8, 2, {"num_workers": 4}, 0.0),
    "GIL, 2 threads -> 2 processes": (_PYTHON, 8, 2, {"processes": 2}, 0.0),
    "computing, 1 -> 2 workers": (_COMPUTES, 8, 1, {"num_workers": 2}, 0.0),
    "computing, 2 -> 8 workers": (_COMPUTES, 8, 2, {"num_workers": 8}, 0.0),
    "waiting and computing, 1 -> 8 workers": (_MIXED, 8, 1, {"num_workers": 8}, 0.0),
    "a trainer of 20 ms, 2 -> 8 workers": (_MIXED, 16, 2, {"num_workers": 8}, 0.02),
    "reading and decoding, cached": (_READS, 16, 2, {"cache": True}, 0.01),
    "ImageFolder, 1 -> 2 workers": ("ImageFolder, evaluation", None, 1, {"num_workers": 2}, 0.0),
    "JSON lines, 1 -> 2 workers": ("JSON lines", None, 1, {"num_workers": 2}, 0.0),
    "npy files, 1 -> 2 workers": ("npy files", None, 1, {"num_workers": 2}, 0.0),
    "CIFAR, 0 -> 2 workers": (
        *("CIFAR, Pillow and v1, evaluation", None, 0),
        *({"num_workers": 2}, 0.0),
    ),
}

_METRICS = (
    Metric(key="base", heading="as it is, batches/s"),
    Metric(key="high", heading="at most", has_spread=False),
    Metric(key="measured", heading="measured"),
    Metric(key="of_it", heading="measured over that", digits=2, higher_is_better=False),
)


@contextlib.contextmanager
def _prepare(options: BenchOptions) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="spdl-torch-bench-") as folder:
        yield {
            "folder": folder,
            "run_seconds": 0.2 if options.smoke else max(1.5, options.seconds),
            "turns": 1 if options.smoke else _TURNS,
        }


def measure(
    contender: Contender, settings: Mapping[str, Any], reporter: Reporter
) -> Mapping[str, float]:
    """Measure one round of one row. Raises: Refused: the report says that it cannot know."""
    from .predicted_loaders import run  # imports torch, which the parent does not need

    case = case_of(contender.name)
    folder, seconds, turns = Path(settings["folder"]), settings["run_seconds"], settings["turns"]
    reporter.phase("in turns", 2 * turns)
    predictions, base, measured = [], [], []
    for turn in range(turns):
        report, rate = run(case, folder, seconds, as_changed=False)
        base.append(rate)
        predictions.append(report.what_if(**case.question))
        reporter.done(2 * turn + 1)
        measured.append(run(case, folder, seconds, as_changed=True)[1])
        reporter.done(2 * turn + 2)
    if turns < _TURNS:  # a smoke run is too short for a prediction
        return {"base": median(base), "measured": median(measured)}
    return figures_of(predictions, base, measured)


def figures_of(
    predictions: list[Any], base: list[float], measured: list[float]
) -> dict[str, float]:
    """Return the bound, what was measured then, and their ratio."""
    known = [each for each in predictions if each.gain is not None]
    figures = {"base": median(base), "measured": median(measured)}
    if 2 * len(known) <= len(predictions):
        unknown = next(each for each in predictions if each.gain is None)
        raise Refused(f"It cannot be known: {unknown.reason}.")
    # The rate from the first batch on is what is measured; the report's includes the start.
    figures["high"] = (1 + median(each.gain for each in known)) * figures["base"]
    figures["of_it"] = figures["measured"] / figures["high"]
    return figures


def case_of(name: str) -> Any:
    """Return the loader and the step of a row."""
    from .predicted_loaders import Case, Synthetic

    dataset, batch_size, num_workers, question, step_seconds = _ROWS[name]
    arguments: dict[str, Any] = {"num_workers": num_workers}
    if batch_size is not None:
        arguments["batch_size"] = batch_size
    changed = {key: value for key, value in question.items() if key == "num_workers"}
    is_synthetic = not isinstance(dataset, str)
    if "processes" in question:
        changed |= {"isolation": "process", "processes": question["processes"]}
    return Case(
        question=question,
        dataset=Synthetic(**dataset) if not isinstance(dataset, str) else dataset,
        arguments={**arguments, **(_ON_THREADS if is_synthetic else {})},
        changed=changed,
        step_seconds=step_seconds,
    )


def conclude(report: Report) -> list[str]:
    """Return how many rates are within the bound, and whether other programs disturbed."""
    if not report.shows_goals or not report.rows:
        return []
    within = sum(report.median(row, "of_it") <= _MOST for row in report.rows)
    lines = [f"Within the bound: {within} of {len(report.rows)} predictions."]
    disturbed = [
        row
        for row, series in report.rows.items()
        if series.get("other_cores") and report.median(row, "other_cores") > _QUIET_CORES
    ]
    if disturbed:
        lines.append(
            f"Other programs used more than {_QUIET_CORES} cores beside {len(disturbed)} of them: "
            "the bound of those is that of the cores that were left."
        )
    return lines


TABLES = {
    "what-if": Table(
        name="what-if",
        title="The bounds that a report gives for other settings, and what is then measured",
        metrics=_METRICS,
        contenders=tuple(
            Contender(name=name, run=measure, smoke=name.startswith("waiting, 2")) for name in _ROWS
        ),
        prepare=_prepare,
        measure=measure,
        goals=tuple(Goal(metric="of_it", row=name, at_most=_MOST) for name in _ROWS),
        conclude=conclude,
        passes=2 * _TURNS,
    )
}
