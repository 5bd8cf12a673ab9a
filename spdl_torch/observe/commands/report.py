"""``python -m spdl_torch report``: what held training back, as a text, JSON or a page."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from .run_options import add_file_and_run, prints

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
    add_file_and_run(
        report, "statistics file, or trace; several: files of the ranks of one run", several=True
    )
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
        help="default: text; JSON has one line for each pipeline, of each file, "
        "which then says its rank",
    )
    report.add_argument(
        "--html",
        type=Path,
        metavar="OUT",
        help="write a page to this file, with charts, and print its path; needs the extra plot",
    )
    report.add_argument(
        "--trace",
        type=Path,
        metavar="TRACE",
        help="a trace of the same run: the page shows what every worker did, and when",
    )
    prints(report, _texts)


def _texts(arguments: argparse.Namespace) -> list[str]:
    if arguments.html is not None and arguments.format == "json":
        raise ValueError("--html and --format json exclude each other: choose one.")
    if len(arguments.db_path) > 1:
        return _texts_of_ranks(arguments)
    runs = _runs_to_report(arguments)
    if arguments.html is None:
        return _texts_of(runs, arguments.format)
    from ..page.page import write_page
    from ..trace.run_page import page_of

    return [str(write_page(arguments.html, page_of(runs)))]


def _texts_of(runs: list[MeasuredRun], form: str) -> list[str]:
    """Return what is said of each pipeline of a run, with its name where there are several."""
    if form == "json":
        return [run.report.as_json() for run in runs]
    if len(runs) == 1:
        return [str(runs[0].report)]
    texts = []
    for run in runs:
        assert run.run is not None, "guaranteed where there are several"
        name = run.run.pipelines()[run.pipeline or 0]
        texts.append(f"{f'PIPELINE {run.pipeline} {name}'.rstrip()}\n{run.report}\n")
    return texts


def _texts_of_ranks(arguments: argparse.Namespace) -> list[str]:
    """Return what is said of each loader: its ranks beside each other, and the report of the one
    that waits longest; as JSON each rank's, with its number."""
    from ..trace.run_page import load_runs
    from ..verdict.ranks import on_ranks, slowest_of, waits_of

    if arguments.html is not None or arguments.trace is not None:
        raise ValueError("--html and --trace are for one file: choose a rank's.")
    loaders: dict[int | None, dict[int, MeasuredRun]] = {}
    for path in arguments.db_path:
        for run in load_runs(path, run_id=arguments.run, pipeline=arguments.pipeline):
            own = loaders.setdefault(run.pipeline, {})
            if run.rank in own:
                raise ValueError(f"{path}: there is a file of rank {run.rank} before it already.")
            own[run.rank] = run
    texts = []
    for own in loaders.values():
        reports = {rank: own[rank].report for rank in sorted(own)}
        if arguments.format == "json":
            said = {rank: json.loads(report.as_json()) for rank, report in reports.items()}
            texts += [json.dumps({"rank": rank, **each}) for rank, each in said.items()]
            continue
        slowest = slowest_of(waits_of(reports))
        name = f"LOADER   {own[slowest].name}\n" if len(loaders) > 1 else ""
        texts.append(f"{name}{on_ranks(reports)}\n\nRank {slowest}:\n{reports[slowest]}\n")
    return texts


def _runs_to_report(arguments: argparse.Namespace) -> list[MeasuredRun]:
    """Return the runs in the file."""
    from ..trace.run_page import load_runs, load_trace

    (path,) = arguments.db_path
    runs = load_runs(path, run_id=arguments.run, pipeline=arguments.pipeline)
    if arguments.trace is not None:
        if len(runs) > 1:
            raise ValueError(f"{path} has several pipelines: choose with --pipeline.")
        runs = [replace(runs[0], trace=load_trace(arguments.trace).trace)]
        if arguments.html is None:
            raise ValueError(
                "--trace adds what every worker did to a page, and no page was asked for. Add "
                f"--html OUT, or report the trace itself: report {arguments.trace}"
            )
    return runs
