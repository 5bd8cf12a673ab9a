"""The work of the command, from the options to the table."""

from __future__ import annotations

import contextlib
import json
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from spdl_torch.progress_bar import ProgressBar
from spdl_torch.shown_text import counted
from spdl_torch.whole_files import write_text

from .child_process import ChildFailure, answers_of
from .cpu_time import OtherPrograms
from .peers import installed, left_out, machine
from .report import Metric, Report, last_line
from .tables import TABLES, load_table

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from .tables import BenchOptions, Contender, Table

_OTHERS = Metric(key="other_cores", heading="others' cores", digits=1, higher_is_better=False)
_NOT_SHOWN = frozenset(
    ("folder", "shards", "no_spdl_decoder", "crop", "num_workers", "workers", "smoke")
)


def run_child(
    program: Path, argument: str, on_line: Callable[[dict[str, Any]], None], limit_seconds: float
) -> tuple[dict[str, Any], float | None]:
    """Run a program with that argument; return its answer and the peak bytes of its process tree.
    Otherwise as :func:`~bench.child_process.answers_of`.
    """
    with contextlib.closing(answers_of(program, argument, on_line, limit_seconds)) as answers:
        return next(answers)


def list_tables(out: TextIO) -> int:
    """Print every table and its contenders; return the exit status."""
    for name, what in TABLES.items():
        table = load_table(name)
        print(f"{name:<17}{what}", file=out)
        for contender in table.contenders:
            missing = [module for module in contender.needs if not installed(module)]
            note = f"   (needs {', '.join(missing)})" if missing else ""
            print(f"{'':<17}  {contender.name}{note}", file=out)
    return 0


def run_bench(
    options: BenchOptions,
    out: TextIO,
    progress: TextIO,
    *,
    table: Table | None = None,
    run: Callable[..., tuple[dict[str, Any], float | None]] = run_child,
) -> int:
    """Measure the table's contenders, print the table, write JSON and picture.

    Ctrl-C ends the run; what was measured so far is printed and written, and the status is 130. It
    is 1 if no contender could be measured, or if one that is also a check failed, and otherwise 0.
    Raises: ValueError: an option that cannot be used.
    """
    table = _for_workers(table or load_table(options.table), options)
    _check_outputs(options)
    chosen, remarks = choose(table, options)
    bench = _Bench(options, table, progress, run)
    bench.report.remarks += remarks
    status = 0
    try:
        with table.prepare(options) as settings:
            bench.measure(chosen, settings)
    except KeyboardInterrupt:
        bench.report.remarks.append("Interrupted: the table holds what was measured until then.")
        status = 130
    bench.finish(chosen)
    print(bench.report.text(), file=out, flush=True)
    write_files(bench.report, options, out)
    has_failed = table.is_strict and bool(bench.report.failures)
    return status or int(has_failed or not bench.report.rows)


def _for_workers(table: Table, options: BenchOptions) -> Table:
    """Return the table for the numbers of workers. Raises: ValueError: it takes only one."""
    counts = (options.num_workers, *options.more_workers)
    if len(set(counts)) < len(counts):
        raise ValueError(f"--workers must be different numbers, got {_listed(counts)}.")
    if table.with_workers is not None:
        return table.with_workers(counts)
    if options.more_workers:
        raise ValueError(f"{table.name} takes one number of workers, got {_listed(counts)}.")
    return table


def _listed(counts: Sequence[int]) -> str:
    return " ".join(map(str, counts))


def _check_outputs(options: BenchOptions) -> None:
    """Refuse files that could not be written at the end, minutes from now."""
    for path in (options.json, options.picture):
        if path is not None and not path.resolve().parent.is_dir():
            raise ValueError(f"{path}: there is no folder {path.parent}.")
    if options.picture is not None and options.picture.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"--picture must end with .png, .svg or .pdf, got {options.picture}.")


def choose(table: Table, options: BenchOptions) -> tuple[list[Contender], list[str]]:
    """Return the contenders to measure, and a line for each peer that is not installed.

    Raises: ValueError: ``only`` names none of them.
    """
    wanted = list(table.contenders)
    if options.smoke and not options.only:
        wanted = [c for c in wanted if c.smoke]
    elif not options.full and not options.only:
        wanted = [c for c in wanted if c.is_usual]
    if options.goals_only and table.goals:
        wanted = [c for c in wanted if any(goal.compares(c.name) for goal in table.goals)]
    for start in options.only:
        if not any(c.name.startswith(start) for c in wanted):
            names = ", ".join(repr(c.name) for c in wanted)
            raise ValueError(f"--only {start!r} is the beginning of none of {names}.")
    if options.only:
        exact = {c.name for c in wanted} & set(options.only)
        starts = tuple(start for start in options.only if start not in exact)
        wanted = [c for c in wanted if c.name in exact or c.name.startswith(starts)]
    missing = {module: None for c in wanted for module in c.needs if not installed(module)}
    there = [c for c in wanted if not any(module in missing for module in c.needs)]
    return there, [left_out(module) for module in missing]


class _Bench:
    """One run of the command, with what has been measured so far."""

    def __init__(
        self,
        options: BenchOptions,
        table: Table,
        progress: TextIO,
        run: Callable[..., tuple[dict[str, Any], float | None]],
    ) -> None:
        self._options = options
        self._table = table
        self._run = run
        self._progress = progress
        self._meter = ProgressBar(progress)
        self._given_up: set[str] = set()
        self._refused: dict[str, list[str]] = {}
        self.report = Report(
            title=f"{table.name}: {table.title}",
            metrics=[*table.metrics, _OTHERS],
            settings=machine(
                rounds=options.rounds,
                workers=_listed((options.num_workers, *options.more_workers))
                if options.more_workers
                else options.num_workers,
            ),
            goals=list(table.goals),
            shows_goals=not options.smoke,
            peer=options.peer or table.peer,
        )

    def measure(self, contenders: list[Contender], settings: Mapping[str, Any]) -> None:
        """Measure round after round, every other one backwards, so that no contender keeps its
        place."""
        shown = {key: value for key, value in settings.items() if key not in _NOT_SHOWN}
        self.report.settings = {**self.report.settings, **shown}
        no_spdl = settings.get("no_spdl_decoder")
        if no_spdl and any(c.decodes_with_spdl for c in contenders):
            self.report.remarks.append(str(no_spdl))
            contenders = [c for c in contenders if not c.decodes_with_spdl]
        rounds, start = self._options.rounds, time.monotonic()
        seconds = self._table.passes * self._options.seconds + self._table.start_seconds
        expected = rounds * len(contenders) * seconds
        if not self._options.smoke:
            how_many = f"{counted(len(contenders), 'contender')}, {counted(rounds, 'round')}"
            how_long = f"{how_many}: about {duration(expected)}."
            early = "Ctrl-C ends it early, with a table of what was measured."
            print(how_long, early, file=self._progress)
        for number in range(rounds):
            for place, contender in enumerate(contenders if number % 2 == 0 else contenders[::-1]):
                if contender.name in self._given_up:
                    continue  # it would fail again
                done = number * len(contenders) + place
                left = time_left(done, rounds * len(contenders), time.monotonic() - start)
                self._measure_one(contender, settings, number, f"{number + 1}/{rounds}{left}")

    def _measure_one(
        self, contender: Contender, settings: Mapping[str, Any], number: int, where: str
    ) -> None:
        label = f"round {where}: {contender.name}"
        job = {
            "table": self._table.name,
            "contender": contender.name,
            "settings": {**settings, "round": number},
        }
        others = OtherPrograms()
        self._meter.begin(label)
        try:
            answer, peak = self._run(
                Path(__file__).with_name("child.py"),
                json.dumps(job),
                partial(self._on_line, label),
                self._options.limit_seconds,
            )
        except ChildFailure as failure:
            self._meter.end()
            self._given_up.add(contender.name)
            self.report.failures[contender.name] = str(failure)
            print(f"{contender.name} failed: {last_line(str(failure))}", file=self._progress)
            return
        self._meter.end()
        if "refused" in answer:
            self._given_up.add(contender.name)
            self._refused.setdefault(answer["refused"], []).append(contender.name)
            return
        complete = _with_memory(answer, peak, others.cores())
        known = [metric.key for metric in self.report.metrics if metric.key in complete]
        self.report.add(contender.name, {key: complete[key] for key in known}, number)

    def _on_line(self, label: str, line: dict[str, Any]) -> None:
        if "phase" in line:
            if self._progress.isatty():  # elsewhere a line for each contender is enough
                self._meter.begin(f"{label}: {line['phase']}", line["total"])
        else:
            self._meter.advance(line["done"])

    def finish(self, contenders: list[Contender]) -> None:
        """Put the rows into the table's order and draw conclusions."""
        self._meter.end()
        places = {contender.name: place for place, contender in enumerate(contenders)}
        rows = self.report.rows
        self.report.rows = dict(sorted(rows.items(), key=lambda row: places.get(row[0], 0)))
        self.report.remarks += [
            f"Left out: {'; '.join(names)}. {why}" for why, names in self._refused.items()
        ]
        if self._table.conclude is not None and rows:
            self.report.remarks += self._table.conclude(self.report)
        if self._options.smoke:
            self.report.remarks.append("Smoke run: too little was measured to mean much.")


def _with_memory(
    figures: Mapping[str, float], peak: float | None, other_cores: float | None
) -> dict[str, float]:
    """Return the values, with what was seen from outside; memory is the larger of both views."""
    values = dict(figures)
    at_end = values.pop("at_end_mib", 0.0)
    if "peak_mib" not in values and (largest := max((peak or 0.0) / 2**20, at_end)):
        values["peak_mib"] = largest
    if other_cores is not None:
        values[_OTHERS.key] = other_cores
    return values


def write_files(report: Report, options: BenchOptions, out: TextIO) -> None:
    """Write the JSON and the picture, if they were asked for."""
    if options.json is not None:
        write_text(options.json, json.dumps(report.as_json(), indent=2) + "\n")
    if options.picture is None or not report.rows:
        return
    if not installed("matplotlib"):
        print(left_out("matplotlib", "The picture"), file=out)
        return
    from .picture import draw

    draw(report, options.picture)
    print(f"Picture: {options.picture}", file=out)


def time_left(done: float, total: float, seconds: float) -> str:
    """Return ``, about 2 min left``: ``done`` of ``total`` equal parts took ``seconds``; "" before
    the first is done.
    """
    return f", about {duration(seconds * (total - done) / done)} left" if done else ""


def duration(seconds: float) -> str:
    """Return ``40 s``, ``2.5 min``, ``12 h``: two digits at most, all that an estimate is worth."""
    if seconds < 90:
        return f"{max(5, 5 * round(seconds / 5))} s"
    if seconds < 570:  # whole minutes would be a fifth and more off
        return f"{round(seconds / 30) / 2:g} min"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.0f} h"
