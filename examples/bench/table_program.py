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

import json
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .losses import add_mean, least_ratio, losses
from .processes import cpu_seconds
from .program import ProgramPlan, all_plans
from .report import Metric
from .tables import Contender, Table

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .report import Report
    from .tables import BenchOptions

LOADERS = {"torch": "torch.utils.data", "ours": "spdl_torch"}
"""The one import that users change."""
_LEAST_HEAVY = 0.99
"""Where the network takes most of the time, ratios below this are losses."""
_WORKERS = (2,)
_MEAN = ": geometric mean"
_RATIO = "ratio"

METRICS = (
    Metric("torch_seconds", "torch, s", 2),
    Metric("ours_seconds", "ours, s", 2),
    Metric(_RATIO, "torch / ours", 2),
    Metric("cpu_ratio", "CPU, torch / ours", 2),
    Metric("torch_first_ms", "first: torch, ms", has_spread=False),
    Metric("ours_first_ms", "ours, ms", has_spread=False),
)


def _prepare(options: BenchOptions, folder: Path) -> dict[str, Any]:
    return {
        "folder": str(folder),
        "seconds": 1e-3 if options.smoke else options.seconds,
        "smoke": options.smoke,
    }


def measure(contender: Contender, settings: Mapping[str, Any]) -> dict[str, float]:
    """Measure one program once with each loader."""
    plan: ProgramPlan = contender.arguments["plan"]
    count = plan.num_samples(settings["seconds"])
    folder = Path(settings["folder"]) / f"{plan.dataset}-{count}"
    if not folder.is_dir():
        folder.mkdir()
        if not settings["smoke"]:  # its data, bytecode, and files in the page cache
            run_program("ours", plan, folder, count)
    names = ("torch", "ours") if settings["round"] % 2 == 0 else ("ours", "torch")
    found = {name: run_program(name, plan, folder, count) for name in names}
    torchs, ours = found["torch"], found["ours"]
    return {
        "torch_seconds": torchs["seconds"],
        "ours_seconds": ours["seconds"],
        _RATIO: torchs["seconds"] / ours["seconds"],
        "cpu_ratio": torchs["cpu_seconds"] / ours["cpu_seconds"],
        "torch_first_ms": torchs["first_batch_ms"],
        "ours_first_ms": ours["first_batch_ms"],
    }


def run_program(loader: str, plan: ProgramPlan, folder: Path, num_samples: int) -> dict[str, float]:
    """Train by ``plan``, from the start of Python to its exit.

    Returns: ``seconds``, ``cpu_seconds`` of the process and its workers, and what the program says
        itself: ``first_batch_ms``.
    Raises: RuntimeError: it failed; the message ends with what it printed.
    """
    program = str(Path(__file__).with_name("program.py"))
    job = {"plan": asdict(plan), "folder": str(folder), "num_samples": num_samples}
    command = [sys.executable, program, LOADERS[loader], json.dumps(job)]
    cpu, start = cpu_seconds(), time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds, used = time.perf_counter() - start, cpu_seconds() - cpu
    if done.returncode:
        raise RuntimeError(f"{loader}: status {done.returncode}\n{done.stderr}")
    said: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return {**said, "seconds": seconds, "cpu_seconds": used}


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
    return [losses(report, rows, _RATIO, _least(way), way) for way, rows in ways.items()]


def _least(way: str) -> float:
    network, workers, *_ = way.split(", ")
    return _LEAST_HEAVY if network == "heavy" else least_ratio(int(workers.split(" ")[0]))


def _table(counts: tuple[int, ...] = _WORKERS) -> Table:
    """Return the table for these numbers of workers, besides 0."""
    return Table(
        name="program",
        title="Whole programs, from the start of Python to its exit: torch's DataLoader and ours",
        metrics=METRICS,
        contenders=tuple(
            Contender(
                plan.name,
                run_program,
                plan.ordinary.needs,
                {"plan": plan},
                smoke=plan.name == "light, 0 workers, 1 epoch: rows",
                is_usual=plan.is_usual,
            )
            for plan in all_plans((0, *counts))
        ),
        prepare=_prepare,
        measure=measure,
        conclude=conclude,
        seconds=(4.0, 7.0),  # of two programs
        is_strict=True,
        workers=_WORKERS,
        with_workers=_table,
    )


TABLE = _table()
