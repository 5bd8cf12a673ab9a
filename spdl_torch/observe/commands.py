"""The commands ``report``, ``plot`` and ``trace``: what statistics files and traces hold."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..command_options import CommandError, whole_number

if TYPE_CHECKING:
    import argparse

    from .trace.profile import MeasuredRun

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]
    Texts = Callable[[argparse.Namespace], Iterable[object]]


def add_report(commands: Commands) -> None:
    """Add ``report``: what held training back, as a text, JSON or a page."""
    report = commands.add_parser(
        "report",
        help="say what held training back, from a statistics file or a trace",
        description="Name what held training back in a run, why, and what to do, with the figures "
        "of every stage: as a text, or as a page for a browser.",
    )
    _add_file_and_run(
        report, "statistics file, or trace; several: files of the ranks of one run", nargs="+"
    )
    add = report.add_argument
    add("--pipeline", type=int, metavar="N", help="which of several in the run (default: each)")
    form = "default: text; JSON has one line for each pipeline, of each file, which then says its "
    add("--format", choices=["text", "json"], default="text", help=f"{form}rank")
    add("--html", type=Path, metavar="OUT", help="write a page with charts; needs the extra plot")
    trace = "a trace of the same run: the page shows what every worker did, and when"
    add("--trace", type=Path, metavar="TRACE", help=trace)
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
    """Add ``trace``: the report in a trace, and merged traces."""
    trace = commands.add_parser(
        "trace",
        help="print the report in a trace, or merge traces of ranks and of torch",
        description="Print the report in a trace. With -o, combine the traces of several ranks, or "
        "one of ours with a trace of torch.profiler, and print the path.",
    )
    add = trace.add_argument
    traces = "trace that Profile.write_trace wrote; with -o also several, or a folder of them"
    add("traces", type=Path, nargs="+", metavar="FILE", help=traces)
    add("-o", "--output", type=Path, metavar="OUT", help="write the merged trace to this file")
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
    print(*texts, sep="\n")
    return 0


def _reported(arguments: argparse.Namespace) -> list[str]:
    """Return what is said of each pipeline of a run, with its name where there are several; or the
    page with all of it."""
    if arguments.html is not None and arguments.format == "json":
        raise ValueError("--html and --format json exclude each other: choose one.")
    if len(arguments.db_path) > 1:
        return _texts_of_ranks(arguments)
    from .page.page import write_page
    from .trace.profile import load_runs, load_trace, page_of

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
    if arguments.html is not None:
        return [str(write_page(arguments.html, page_of(runs)))]
    if arguments.format == "json":
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
    from .trace.profile import load_runs
    from .verdict.ranks import on_ranks, slowest_of, waits_of

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


def _merged(arguments: argparse.Namespace) -> list[object]:
    from . import merge_ranks, merge_with_torch
    from .trace.trace_file import profiles_of, read, report_in

    traces, torch, output = arguments.traces, arguments.torch, arguments.output
    if output is None:
        if torch:
            raise ValueError("--torch merges two traces into a file: name it with -o.")
        if len(traces) > 1:
            raise ValueError("several traces are merged into a file: name it with -o.")
        (path,) = traces
        return ["\n\n".join(str(report_in(each, path)) for each in profiles_of(read(path), path))]
    if torch is None:
        merge_ranks(traces, output)
    else:
        merge_with_torch(traces, torch, output)
    return [output]
