"""The command, from its options to the table."""

from __future__ import annotations

import json
import signal
import sys
import tempfile
import time
from argparse import ArgumentParser, ArgumentTypeError
from dataclasses import replace
from pathlib import Path
from threading import TIMEOUT_MAX
from typing import TYPE_CHECKING, Any, TextIO

from spdl_torch.command_options import whole_number
from spdl_torch.shown_text import counted, printable
from spdl_torch.whole_files import whole_file

from .child_process import ChildFailure, run_child
from .peers import find_spdl_decoder, installed, left_out, machine
from .processes import cpu_seconds_of_others
from .report import Metric, Report, last_line
from .tables import TABLES, BenchOptions, load_table

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .tables import Contender, Settings, Table

    Run = Callable[[Path, str, float], tuple[dict[str, Any], float]]

_OTHERS = Metric("other_cores", "others' cores", 1)
_NOT_SHOWN = frozenset(("folder", "crop", "num_workers", "workers", "smoke"))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the table that ``argv`` names; return the exit status.

    argv: None = this process's arguments; SIGTERM then ends the run as Ctrl-C does, with the
        results so far.
    """
    if argv is None:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    arguments = vars(parser().parse_args(argv))
    try:
        if arguments.pop("list"):
            return list_tables(sys.stdout)
        if arguments["table"] is None:
            raise ValueError("name a table, or --list them.")
        return run_bench(BenchOptions(**arguments), sys.stdout, sys.stderr)
    except KeyboardInterrupt:
        return 130
    except (OSError, ValueError, SystemExit) as error:  # a folder without data ends the examples
        print(f"bench: {printable(str(error))}", file=sys.stderr)
        return 2


def parser() -> ArgumentParser:
    """Return a parser of the fields of ``BenchOptions``."""
    bench = ArgumentParser(
        prog="bench",
        description="Measure one table: every contender in a process of its own, in interleaved "
        "rounds; print medians with the spread, ratios and goals. That takes about rounds x "
        "contenders x (--seconds + 4 s), 2 to 60 minutes, which is said at the start. A peer that "
        "is not installed is left out, and a line says how to install it.",
    )
    add = bench.add_argument
    add("table", nargs="?", metavar="TABLE", help=", ".join(TABLES))
    add("--list", action="store_true", help="list tables and contenders, and end")
    rounds = "how often each contender is measured (default: 5; 1 with --smoke)"
    add("--rounds", type=whole_number, metavar="N", help=rounds)
    seconds = (
        "about how long a pass takes torch's DataLoader; sets everybody's samples (default: 2)"
    )
    add("--seconds", type=_positive_seconds, default=2.0, metavar="S", help=seconds)
    workers = "num_workers (default: 2; for ordinary, which measures 0, too: 2 4)"
    add("--workers", type=whole_number, nargs="+", default=(), metavar="N", help=workers)
    data = "photographs (one folder of JPEGs per class) or, for clips, videos (default: made)"
    add("--data", type=Path, metavar="DIR", help=data)
    only = "only this contender, or those whose names begin so; may be given several times"
    add("--only", action="append", default=[], metavar="NAME", help=only)
    add("--goals", action="store_true", help="only contenders that a goal compares")
    add("--peer", metavar="NAME", help="whose figures the last column divides by")
    add("--full", action="store_true", help="the sizes that take long, too")
    add("--smoke", action="store_true", help="a run of seconds that shows it works")
    limit = "a measurement that takes longer has failed (default: 120)"
    add("--limit", type=_positive_seconds, default=120.0, metavar="S", help=limit)
    add("--json", type=Path, metavar="FILE", help="write every value to FILE")
    return bench


def _positive_seconds(text: str) -> float:
    """Parse an option's value, a number of seconds above 0 that a thread can wait for."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= TIMEOUT_MAX:
        raise ArgumentTypeError(f"must be seconds above 0, and finite, got {text}")
    return value


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
            if any(contender.decodes_with_spdl for contender in contenders):
                find_spdl_decoder(Path(folder))
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
        compared = {name for goal in table.goals for name in (goal.row, goal.over)}
        wanted = [c for c in wanted if c.name in compared]
    if options.only:
        names, chosen = [c.name for c in wanted], set[str]()
        for start in options.only:
            own = [start] if start in names else [name for name in names if name.startswith(start)]
            if not own:
                raise ValueError(f"--only {start!r} is the beginning of none that --list shows.")
            chosen.update(own)
        wanted = [c for c in wanted if c.name in chosen]
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
            others, began = cpu_seconds_of_others(), time.monotonic()
            try:
                child = Path(__file__).with_name("child.py")
                values, peak = run(child, json.dumps(job), options.limit)
            except ChildFailure as failure:
                report.failures[contender.name] = str(failure)
                print(f"{contender.name} failed: {last_line(str(failure))}", file=progress)
                continue
            # Memory is the larger of what was seen from outside and what the process has seen.
            if largest := max(peak / 2**20, values.get("at_end_mib", 0.0)):
                values.setdefault("peak_mib", largest)
            if others is not None and (now := cpu_seconds_of_others()) is not None:
                values[_OTHERS.key] = max(0.0, (now - others) / (time.monotonic() - began))
            known = [metric.key for metric in report.metrics if metric.key in values]
            report.add(contender.name, {key: values[key] for key in known}, number)
