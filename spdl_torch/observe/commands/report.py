"""``python -m spdl_torch report``: what held training back, as a text, JSON or a page."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...command_options import CommandError, whole_number
from .run_options import add_file_and_run

if TYPE_CHECKING:
    import argparse

    from ..trace.run_page import MeasuredRun


def add_report(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to those of ``spdl-torch``."""
    report = commands.add_parser(
        "report",
        help="say what held training back, from a statistics file or a trace",
        description="Name what held training back in a run, why, and what to do, with the figures "
        "of every stage: as a text, or as a page for a browser.",
    )
    add_file_and_run(report, "statistics file, or trace")
    report.add_argument(
        "--pipeline",
        type=int,
        metavar="N",
        help="which pipeline of several in the run (default: each)",
    )
    report.add_argument(
        "--format",
        choices=["text", "json"],
        default="text",
        help="default: text; JSON has one line for each pipeline",
    )
    report.add_argument(
        "--html",
        type=Path,
        metavar="OUT",
        help="write a page to this file, with charts that can be zoomed, and print its path; needs "
        "the extra report",
    )
    report.add_argument(
        "--trace",
        type=Path,
        metavar="TRACE",
        help="a trace of the same run: the page shows what every worker did, and when",
    )
    report.add_argument(
        "--compare",
        type=Path,
        metavar="OTHER",
        help="another statistics file or trace: say what became faster, why, and whether that is "
        "more than noise",
    )
    report.add_argument(
        "--compare-run",
        type=whole_number,
        metavar="ID",
        help="which run of OTHER, or of FILE (default: the last with figures)",
    )
    report.set_defaults(run_command=_report)


def _report(arguments: argparse.Namespace) -> int:
    import sqlite3

    try:
        if arguments.html is not None and arguments.format == "json":
            raise ValueError(
                "--html and --format json exclude each other: choose one. The page has the figures "
                "as JSON in it, as spdl-figures."
            )
        pairs = _runs_to_report(arguments)
        if arguments.html is not None:
            from ..page.document import write_page
            from ..trace.run_page import page_of

            print(write_page(page_of(pairs), arguments.html))
            return 0
    except (OSError, ValueError, ModuleNotFoundError, sqlite3.Error) as error:
        raise CommandError(error) from error
    for run, other in pairs:
        _print_report(run, other, arguments.format, is_single=len(pairs) == 1)
    return 0


def _runs_to_report(arguments: argparse.Namespace) -> list[tuple[MeasuredRun, MeasuredRun | None]]:
    """Return the runs in the file, each with the run to compare it with, or None."""
    from ..trace.loading import is_statistics_file, load_runs, load_trace

    chosen = {"run_id": arguments.run, "pipeline": arguments.pipeline}
    runs = load_runs(arguments.db_path, **chosen)
    if arguments.trace is not None:
        if len(runs) > 1:
            raise ValueError(f"{arguments.db_path} has several pipelines: choose with --pipeline.")
        runs = [replace(runs[0], trace=load_trace(arguments.trace).trace)]
    if arguments.compare is None and arguments.compare_run is None:
        return [(run, None) for run in runs]
    path = arguments.compare or arguments.db_path
    # A trace to compare with has no pipelines to choose from.
    pipeline = arguments.pipeline if is_statistics_file(path) else None
    others = load_runs(path, run_id=arguments.compare_run, pipeline=pipeline)
    if len(runs) == len(others) == 1:
        return [(runs[0], _named(others[0], path, arguments.db_path))]
    by_name = {other.name: _named(other, path, arguments.db_path) for other in others}
    return [(run, by_name.get(run.name)) for run in runs]


def _named(other: MeasuredRun, path: Path, own_path: Path) -> MeasuredRun:
    """Return the run to compare with, under a name that no run in the file itself has."""
    name = path.name if path.name != own_path.name else str(path)
    if path == own_path and other.run is not None:
        name = f"run {other.run.run_id}"
    return replace(other, name=name)


def _print_report(
    run: MeasuredRun, other: MeasuredRun | None, form: str, *, is_single: bool
) -> None:
    from ..trace.run_page import comparison_of

    comparison = None if other is None else comparison_of(run, other)
    if form == "json":
        content = json.loads(run.report.as_json())
        if other is not None:
            content["comparison"] = comparison and asdict(comparison)
        print(json.dumps(content, allow_nan=False))
        return
    if not is_single and run.run is not None:
        print(f"PIPELINE {run.run.pipeline} {run.run.name}".rstrip())
    print(run.report)
    if comparison is not None:
        print(comparison)
    elif other is not None:
        print(f"COMPARED Not with {other.name}: one of the two delivered nothing.")
    if not is_single:
        print()
