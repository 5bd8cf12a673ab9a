"""``python -m spdl_torch report``: what held training back, as a text, JSON or a page."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from ...command_options import CommandError, whole_number
from ...shown_text import printable, wrapped
from .run_options import add_file_and_run

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

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
        pairs, not_compared = _runs_to_report(arguments)
        if arguments.html is not None:
            from ..page.document import write_page
            from ..trace.run_page import page_of

            print(write_page(page_of(pairs, not_compared), arguments.html))
            return 0
    except (OSError, ValueError, ModuleNotFoundError, sqlite3.Error) as error:
        raise CommandError(error) from error
    if arguments.format == "json":
        _print_lines(pairs, not_compared)
        return 0
    for run, other in pairs:
        _print_text(run, other, is_single=len(pairs) == 1)
    for sentence in not_compared:
        print(_compared(sentence))
    return 0


Pairs: TypeAlias = "list[tuple[MeasuredRun, MeasuredRun | None]]"


def _runs_to_report(arguments: argparse.Namespace) -> tuple[Pairs, list[str]]:
    """Return the runs in the file, each with the run to compare it with, or None; and a sentence on
    each pipeline that was to be compared and has no partner.
    """
    from ..trace.loading import load_runs, load_trace

    runs = load_runs(arguments.db_path, run_id=arguments.run, pipeline=arguments.pipeline)
    if arguments.trace is not None:
        if len(runs) > 1:
            raise ValueError(f"{arguments.db_path} has several pipelines: choose with --pipeline.")
        runs = [replace(runs[0], trace=load_trace(arguments.trace).trace)]
        if arguments.html is None:
            raise ValueError(
                "--trace adds what every worker did to a page, and no page was asked for. Add "
                f"--html OUT, or report the trace itself: report {arguments.trace}"
            )
    if arguments.compare is None and arguments.compare_run is None:
        return [(run, None) for run in runs], []
    path = arguments.compare or arguments.db_path
    others = load_runs(path, run_id=arguments.compare_run)
    if len(others) > 1 and arguments.pipeline is not None:
        others = load_runs(path, run_id=arguments.compare_run, pipeline=arguments.pipeline)
    if len(runs) == len(others) == 1:
        return [(runs[0], _named(others[0], path, arguments.db_path))], []
    return _partners(runs, others, arguments.db_path, path)


def _partners(
    runs: Sequence[MeasuredRun], others: Sequence[MeasuredRun], own_path: Path, path: Path
) -> tuple[Pairs, list[str]]:
    """Match the pipelines of two files by their names."""
    labels = [_label(run) for run in runs]
    by_label = {_label(other): other for other in others}
    if not set(labels) & by_label.keys():
        here, there = ", ".join(labels), ", ".join(by_label)
        nothing = f"Nothing: {own_path} has {here}; {path} has {there}; no name is in both."
        if len(others) == 1:
            nothing += f" Choose one: report {own_path} --pipeline N --compare {path}"
        elif len(runs) == 1:
            nothing += f" Choose one: report {path} --pipeline N --compare {own_path}"
        return [(run, None) for run in runs], [nothing]
    found = {label: _named(other, path, own_path) for label, other in by_label.items()}
    pairs = [(run, found.get(label)) for run, label in zip(runs, labels, strict=True)]
    return pairs, [
        *(f"Not {each!r} of {own_path}: {path} has none." for each in labels if each not in found),
        *(f"Not {each!r} of {path}: {own_path} has none." for each in found if each not in labels),
    ]


def _label(run: MeasuredRun) -> str:
    """Return the name of a pipeline, also where it is alone in its file; a trace has none."""
    return "one pipeline without a name" if run.run is None else run.run.label


def _named(other: MeasuredRun, path: Path, own_path: Path) -> MeasuredRun:
    """Return the run to compare with, under a name that no run in the file itself has."""
    name = path.name if path.name != own_path.name else str(path)
    if path == own_path and other.run is not None:
        name = f"run {other.run.run_id}"
    return replace(other, name=name)


def _print_lines(pairs: Pairs, not_compared: Sequence[str]) -> None:
    """Print a line of JSON for each run; the first says which pipelines have no partner."""
    from ..trace.run_page import comparison_of, too_little_of

    is_comparing = bool(not_compared) or any(other is not None for _, other in pairs)
    for run, other in pairs:
        content = json.loads(run.report.as_json())
        if is_comparing:
            comparison = other and comparison_of(run, other)
            reasons = [too_little_of(run, other)] if other and comparison is None else []
            content["comparison"] = comparison and asdict(comparison)
            content["not_compared"] = [*reasons, *not_compared]
            not_compared = ()
        print(json.dumps(content, allow_nan=False))


def _print_text(run: MeasuredRun, other: MeasuredRun | None, *, is_single: bool) -> None:
    from ..trace.run_page import comparison_of, too_little_of

    if not is_single and run.run is not None:
        print(f"PIPELINE {run.run.pipeline} {run.run.name}".rstrip())
    print(run.report)
    if other is not None:
        print(comparison_of(run, other) or _compared(too_little_of(run, other)))
    if not is_single:
        print()


def _compared(sentence: str) -> str:
    return printable(wrapped(sentence, "COMPARED "))
