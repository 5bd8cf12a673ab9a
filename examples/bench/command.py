"""The work of the command, from the options to the table."""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from spdl_torch.shown_text import counted
from spdl_torch.whole_files import whole_file

from .child_process import ChildFailure, run_child
from .cpu_time import OtherPrograms
from .peers import installed, left_out, machine
from .report import Report, cost, last_line
from .tables import TABLES, load_table

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from .tables import BenchOptions, Contender, Settings, Table

    Run = Callable[[Path, str, float], tuple[dict[str, Any], float]]

_OTHERS = cost("other_cores", "others' cores", 1)
_NAMES_IN_ERROR = 12
_NOT_SHOWN = frozenset(("folder", "no_spdl_decoder", "crop", "num_workers", "workers", "smoke"))


def list_tables(out: TextIO) -> int:
    """Print every table and its contenders; return the exit status."""
    for name, what in TABLES.items():
        print(f"{name:<17}{what}", file=out)
        for contender in load_table(name).contenders:
            missing = [module for module in contender.needs if not installed(module)]
            note = f"   (needs {', '.join(missing)})" if missing else ""
            print(f"{'':<17}  {contender.name}{note}", file=out)
    return 0


def run_bench(
    options: BenchOptions, out: TextIO, progress: TextIO = sys.stderr, run: Run = run_child
) -> int:
    """Measure the table's contenders, print the table, write JSON.

    Ctrl-C ends the run; what was measured so far is printed and written, and the status is 130. It
    is 1 if no contender could be measured, or if one that is also a check failed, and otherwise 0.
    Raises: ValueError: an option that cannot be used.
    """
    table = load_table(options.table)
    options = replace(
        options,
        workers=options.workers or table.workers,
        rounds=options.rounds or (1 if options.smoke else 5),
    )
    table = _for_workers(table, options.workers)
    if options.json is not None and not options.json.resolve().parent.is_dir():
        raise ValueError(f"{options.json}: there is no folder {options.json.parent}.")
    contenders, remarks = choose(table, options)
    workers = _listed(options.workers) if options.workers[1:] else options.workers[0]
    report = Report(
        title=f"{table.name}: {table.title}",
        metrics=[*table.metrics, _OTHERS],
        settings=machine(rounds=options.rounds, workers=workers),
        goals=list(table.goals),
        remarks=remarks,
        shows_goals=not options.smoke,
        peer=options.peer or table.peer,
    )
    status = 0
    try:
        with tempfile.TemporaryDirectory(prefix="spdl-torch-bench-") as folder:
            settings = table.prepare(options, Path(folder))
            settings = {"num_workers": options.workers[0], **settings}
            _measure(table, contenders, settings, options, report, progress, run)
    except KeyboardInterrupt:
        report.remarks.append("Interrupted: the table holds what was measured until then.")
        status = 130
    if table.conclude is not None and report.rows:
        report.remarks += table.conclude(report)
    if options.smoke:
        report.remarks.append("Smoke run: too little was measured to mean much.")
    print(report.text(), file=out, flush=True)
    if options.json is not None:
        with whole_file(options.json) as file:
            file.write(json.dumps(report.as_json(), indent=2).encode() + b"\n")
    has_failed = table.is_strict and bool(report.failures)
    return status or int(has_failed or not report.rows)


def _for_workers(table: Table, counts: Sequence[int]) -> Table:
    """Return the table for the numbers of workers. Raises: ValueError: it takes only one."""
    if len(set(counts)) < len(counts):
        raise ValueError(f"--workers must be different numbers, got {_listed(counts)}.")
    if table.with_workers is not None:
        return table.with_workers(tuple(counts))
    if len(counts) > 1:
        raise ValueError(f"{table.name} takes one number of workers, got {_listed(counts)}.")
    return table


def _listed(counts: Sequence[int]) -> str:
    return " ".join(map(str, counts))


def choose(table: Table, options: BenchOptions) -> tuple[list[Contender], list[str]]:
    """Return the contenders to measure, and a line for each peer that is not installed.

    Raises: ValueError: ``only`` names none of them.
    """
    wanted = list(table.contenders)
    if options.smoke and not options.only:
        wanted = [c for c in wanted if c.smoke]
    elif not options.full and not options.only:
        wanted = [c for c in wanted if c.is_usual]
    if options.goals and table.goals:
        wanted = [c for c in wanted if any(goal.compares(c.name) for goal in table.goals)]
    for start in options.only:
        if not any(c.name.startswith(start) for c in wanted):
            names = ", ".join(repr(c.name) for c in wanted[:_NAMES_IN_ERROR])
            rest = ", ...; --list shows all" if len(wanted) > _NAMES_IN_ERROR else ""
            raise ValueError(f"--only {start!r} is the beginning of none of {names}{rest}.")
    if options.only:
        exact = {c.name for c in wanted} & set(options.only)
        starts = tuple(start for start in options.only if start not in exact)
        wanted = [c for c in wanted if c.name in exact or c.name.startswith(starts)]
    missing = {module: None for c in wanted for module in c.needs if not installed(module)}
    there = [c for c in wanted if not any(module in missing for module in c.needs)]
    return there, [left_out(module) for module in missing]


def _measure(
    table: Table,
    contenders: list[Contender],
    settings: Settings,
    options: BenchOptions,
    report: Report,
    progress: TextIO,
    run: Run,
) -> None:
    """Measure round after round, every other one backwards, so that no contender keeps its
    place. One that failed would fail again, and is tried no more."""
    shown = {key: value for key, value in settings.items() if key not in _NOT_SHOWN}
    report.settings = {**report.settings, **shown}
    if why := settings.get("no_spdl_decoder"):
        usable = [c for c in contenders if not c.decodes_with_spdl]
        report.remarks += [str(why)] if len(usable) < len(contenders) else []
        contenders = usable
    rounds = options.rounds or 1
    if not options.smoke:
        passes, start = table.seconds
        minutes = rounds * len(contenders) * (passes * options.seconds + start) / 60
        how_many = f"{counted(len(contenders), 'contender')}, {counted(rounds, 'round')}"
        early = "Ctrl-C ends it early, with a table of what was measured."
        print(f"{how_many}: about {minutes:.1f} min. {early}", file=progress)
    for number in range(rounds):
        for contender in contenders if number % 2 == 0 else contenders[::-1]:
            if contender.name in report.failures:
                continue
            print(f"round {number + 1}/{rounds}: {contender.name}", file=progress, flush=True)
            own = {**settings, "round": number}
            job = {"table": table.name, "contender": contender.name, "settings": own}
            others = OtherPrograms()
            try:
                child = Path(__file__).with_name("child.py")
                answer, peak = run(child, json.dumps(job), options.limit)
            except ChildFailure as failure:
                report.failures[contender.name] = str(failure)
                print(f"{contender.name} failed: {last_line(str(failure))}", file=progress)
                continue
            values = _with_memory(answer, peak, others.cores())
            known = [metric.key for metric in report.metrics if metric.key in values]
            report.add(contender.name, {key: values[key] for key in known}, number)


def _with_memory(
    figures: Mapping[str, float], peak: float, other_cores: float | None
) -> dict[str, float]:
    """Return the values, with what was seen from outside; memory is the larger of both views."""
    values = dict(figures)
    if largest := max(peak / 2**20, values.get("at_end_mib", 0.0)):
        values.setdefault("peak_mib", largest)
    if other_cores is not None:
        values[_OTHERS.key] = other_cores
    return values
