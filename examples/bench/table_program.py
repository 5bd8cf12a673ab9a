"""``program``: whole training programs, by torch's DataLoader and by ours.

Each program is a fresh process: the clock runs from the start of Python to its exit, so imports,
the first batch, all epochs and the end are in it. The two loaders take turns, and every other round
begins with ours. Both networks compute on one thread. ``first`` is the wait from the first
``iter()`` to the first batch, as it comes: nothing is collected or imported before.

Without ``--full`` or ``--only`` the usual programs are measured: 3 epochs with and without workers,
1 epoch, persistent workers, and resnet18. ``--only`` takes the beginning of a name, such as
``"light, 2 workers, 3 epochs:"``.
"""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .losses import add_mean, disturbance, least_ratio, losses
from .program.fresh import run_program
from .program.plans import ProgramPlan, all_plans
from .report import Metric
from .tables import Contender, Table

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from .report import Report
    from .reporter import Reporter
    from .tables import BenchOptions

_LEAST_HEAVY = 0.99
"""Where the network takes most of the time, ratios below this are losses."""
_WORKERS = (2,)
_MEAN = ": geometric mean"
_RATIO = "ratio"

METRICS = (
    Metric(key="torch_seconds", heading="torch, s", digits=2, higher_is_better=False),
    Metric(key="ours_seconds", heading="ours, s", digits=2, higher_is_better=False),
    Metric(key=_RATIO, heading="torch / ours", digits=2),
    Metric(key="cpu_ratio", heading="CPU, torch / ours", digits=2),
    Metric(
        key="torch_first_ms", heading="first: torch, ms", has_spread=False, higher_is_better=False
    ),
    Metric(key="ours_first_ms", heading="ours, ms", has_spread=False, higher_is_better=False),
)


@contextlib.contextmanager
def _prepare(options: BenchOptions) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="spdl-torch-bench-") as folder:
        yield {
            "folder": folder,
            "seconds": 1e-3 if options.smoke else options.seconds,
            "smoke": options.smoke,
        }


def measure(
    contender: Contender, settings: Mapping[str, Any], reporter: Reporter
) -> dict[str, float]:
    """Measure one program once with each loader."""
    plan: ProgramPlan = contender.arguments["plan"]
    count = plan.num_samples(settings["seconds"])
    folder = Path(settings["folder"]) / f"{plan.dataset}-{count}"
    if not folder.is_dir():
        folder.mkdir()
        if not settings["smoke"]:  # its data, bytecode, and files in the page cache
            reporter.phase("a first run", 0)
            run_program("ours", plan, folder, count)
    found = {}
    for name in ("torch", "ours") if settings["round"] % 2 == 0 else ("ours", "torch"):
        reporter.phase(name, 0)
        found[name] = contender.run(name, plan, folder, count)
    torchs, ours = found["torch"], found["ours"]
    return {
        "torch_seconds": torchs["seconds"],
        "ours_seconds": ours["seconds"],
        _RATIO: torchs["seconds"] / ours["seconds"],
        "cpu_ratio": torchs["cpu_seconds"] / ours["cpu_seconds"],
        "torch_first_ms": torchs["first_batch_ms"],
        "ours_first_ms": ours["first_batch_ms"],
    }


def conclude(report: Report) -> list[str]:
    """Add a row of geometric means for each way of training; return a line for its losses, unless
    the run was too short to judge.
    """
    ways: dict[str, list[str]] = {}
    for row in report.rows:
        ways.setdefault(row.rpartition(": ")[0], []).append(row)
    for way, rows in ways.items():
        add_mean(report, f"{way}{_MEAN}", rows, (_RATIO, "cpu_ratio"))
    if not report.shows_goals:
        return []
    lines = [losses(report, rows, _RATIO, _least(way), way) for way, rows in ways.items()]
    return lines + disturbance(report, [row for rows in ways.values() for row in rows])


def _least(way: str) -> float:
    network, workers, *_ = way.split(", ")
    return _LEAST_HEAVY if network == "heavy" else least_ratio(int(workers.split(" ")[0]))


def _contender(plan: ProgramPlan) -> Contender:
    return Contender(
        name=plan.name,
        run=run_program,
        needs=plan.ordinary.needs,
        arguments={"plan": plan},
        smoke=plan.name == "light, 0 workers, 1 epoch: rows",
        is_usual=plan.is_usual,
    )


def _table(counts: tuple[int, ...] = _WORKERS) -> Table:
    """Return the table for these numbers of workers, besides 0."""
    return Table(
        name="program",
        title="Whole programs, from the start of Python to its exit: torch's DataLoader and ours",
        metrics=METRICS,
        contenders=tuple(map(_contender, all_plans((0, *counts)))),
        prepare=_prepare,
        measure=measure,
        conclude=conclude,
        passes=4.0,
        start_seconds=7.0,  # of two programs
        is_strict=True,
        workers=_WORKERS,
        with_workers=_table,
    )


TABLES = {"program": _table()}
