"""The commands ``report``, ``plot`` and ``trace``: what statistics files and traces hold."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..command_options import CommandError, whole_number
from ..shown_text import printable

if TYPE_CHECKING:
    import argparse

    from .verdict.report import Report

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]
    Texts = Callable[[argparse.Namespace], Iterable[object]]


def add_report(commands: Commands) -> None:
    """Add ``report``: what held training back, as a text, JSON or a page."""
    report = commands.add_parser(
        "report",
        help="say what held training back, from a statistics file",
        description="Name what held training back in a run, why, and what to do, with the figures "
        "of every stage: as a text, or as a page for a browser.",
    )
    what = "statistics file; several: those of the ranks of one run"
    _add_file_and_run(report, what, nargs="+")
    add = report.add_argument
    add("--pipeline", type=int, metavar="N", help="which of several in the run (default: each)")
    form = "default: text; JSON has one line for each pipeline, of each file, which then says its "
    add("--format", choices=["text", "json"], default="text", help=f"{form}rank")
    add("--html", type=Path, metavar="OUT", help="write a page with charts; needs the extra plot")
    report.set_defaults(run_command=partial(_print, _reported))


def add_plot(commands: Commands) -> None:
    """Add ``plot``: pictures of a statistics file."""
    plot = commands.add_parser(
        "plot",
        help="draw what a statistics file holds: stages, queues, garbage collections",
        description="Draw the stages and the queues of a run, with the bottleneck, into two "
        "pictures, and print their paths. Times are seconds since 1970, or after the run's "
        "start (+90).",
    )
    _add_file_and_run(plot, "statistics file that SQLiteStatsWriter wrote")
    add = plot.add_argument
    folder = "folder of the pictures (default: the current one)"
    add("-o", "--output", type=Path, default=Path(), metavar="DIR", help=folder)
    stages = "only these stages and their queues: decode, or 0:1:decode[10] (default: all)"
    add("--stage", dest="stages", nargs="+", action="extend", metavar="NAME", help=stages)
    add("--start", metavar="TIME", help="draw from then on (default: the start)")
    add("--end", metavar="TIME", help="draw up to then (default: the end)")
    plot.set_defaults(run_command=partial(_print, _drawn))


def add_trace(commands: Commands) -> None:
    """Add ``trace``, which merges traces."""
    trace = commands.add_parser(
        "trace",
        help="merge traces of ranks and of torch",
        description="Combine the traces of several ranks, or one of ours with a trace of "
        "torch.profiler, and print the path.",
    )
    add = trace.add_argument
    traces = "trace that tracing or Profile.write_trace wrote"
    add("traces", type=Path, nargs="+", metavar="FILE", help=traces)
    output = "write the merged trace to this file"
    add("-o", "--output", type=Path, metavar="OUT", help=output, required=True)
    add("--torch", type=Path, metavar="TRACE", help="of torch.profiler, in the same process")
    trace.set_defaults(run_command=partial(_print, _merged))


def _add_file_and_run(command: argparse.ArgumentParser, what: str, **number: Any) -> None:
    command.add_argument("db_path", type=Path, metavar="FILE", help=what, **number)
    run = "which run of several in the file (default: the last with figures)"
    command.add_argument("--run", type=whole_number, metavar="ID", help=run)


def _print(texts_of: Texts, arguments: argparse.Namespace) -> int:
    """Print the texts of a command, one below the other, or say in one what is wrong."""
    import sqlite3

    try:
        texts = texts_of(arguments)
    except (OSError, ValueError, ModuleNotFoundError, sqlite3.Error) as error:
        raise CommandError(error) from error
    # Names in a file may be somebody else's, and anything.
    print(printable("\n".join(map(str, texts))))
    return 0


def _reported(arguments: argparse.Namespace) -> list[str]:
    """Return what is said of each pipeline of a run, with its name where there are several; or the
    page with all of it."""
    if arguments.html is not None and arguments.format == "json":
        raise ValueError("--html and --format json exclude each other: choose one.")
    if len(arguments.db_path) > 1:
        return _texts_of_ranks(arguments)
    from .page.page import write_page
    from .store.stored_run import StoredRun
    from .trace.profile import page_of

    (path,) = arguments.db_path
    with StoredRun.opened(path, arguments.run) as run:
        names, reports = run.pipelines(), run.reports(arguments.pipeline)
        if arguments.html is not None:
            return [str(write_page(arguments.html, page_of(run, reports)))]
    if arguments.format == "json":
        return [report.as_json() for report in reports.values()]
    if len(reports) == 1:
        return list(map(str, reports.values()))
    return [
        f"{f'PIPELINE {number} {names[number]}'.rstrip()}\n{report}\n"
        for number, report in reports.items()
    ]


def _texts_of_ranks(arguments: argparse.Namespace) -> list[str]:
    """Return what is said of each loader: its ranks beside each other, and the report of the one
    that waits longest; as JSON each rank's, with its number."""
    from .store.stored_run import StoredRun
    from .verdict.ranks import told_of_ranks

    if arguments.html is not None:
        raise ValueError("--html is for one file: choose a rank's.")
    loaders: dict[int, dict[int, Report]] = {}
    names: dict[int, str] = {}
    for path in arguments.db_path:
        with StoredRun.opened(path, arguments.run) as run:
            rank, reports = run.facts["rank"], run.reports(arguments.pipeline)
            names |= run.pipelines()
        for number, report in reports.items():
            own = loaders.setdefault(number, {})
            if rank in own:
                raise ValueError(f"{path}: there is a file of rank {rank} before it already.")
            own[rank] = report
    texts = []
    for number, own in loaders.items():
        by_rank = dict(sorted(own.items()))
        if arguments.format == "json":
            said = {rank: json.loads(report.as_json()) for rank, report in by_rank.items()}
            texts += [json.dumps({"rank": rank, **each}) for rank, each in said.items()]
            continue
        name = names[number] or f"pipeline {number}"
        name = f"LOADER   {name}\n" if len(loaders) > 1 else ""
        texts.append(f"{name}{told_of_ranks(by_rank)}\n")
    return texts


def _drawn(arguments: argparse.Namespace) -> list[Path]:
    from . import plot_stats

    return plot_stats(
        arguments.db_path,
        arguments.output,
        stages=arguments.stages,
        start_time=arguments.start,
        end_time=arguments.end,
        run_id=arguments.run,
    )


def _merged(arguments: argparse.Namespace) -> list[Path]:
    from . import merge_ranks, merge_with_torch

    if arguments.torch is None:
        return [merge_ranks(arguments.traces, arguments.output)]
    return [merge_with_torch(arguments.traces, arguments.torch, arguments.output)]
