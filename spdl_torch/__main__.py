"""The command line: ``python -m spdl_torch demo``, ``report``, ``watch``, ``plot``, ``trace``,
``prepare``, ``bench``, ``check-gpu`` and ``photographs``."""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import sys
import tempfile
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from . import __version__
from .bench.arguments import add_bench, whole_number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .observe.trace.run_page import MeasuredRun

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in ``argv``; return its exit status.

    argv: None = this process's arguments; SIGTERM then ends the command as Ctrl-C does, with the
        results so far.
    """
    if argv is None:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        arguments = _parser().parse_args(argv)
        status = int(arguments.run_command(arguments))
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        if not _reader_left():
            raise
        return 141  # what a shell shows for a program that SIGPIPE ends


def _reader_left() -> bool:
    """Return whether nobody reads stdout any more, as after ``| head``; then drop the rest."""
    if not hasattr(select, "poll"):
        return False
    poll = select.poll()
    poll.register(sys.stdout, 0)
    if not any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)):
        return False
    with open(os.devnull, "w") as nowhere:  # or the interpreter complains when it flushes
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
    return True


def _demo(arguments: argparse.Namespace) -> int:
    from .demo.command import DemoOptions, UsageError, default_workers, run_demo

    options = DemoOptions(
        data=arguments.data,
        epochs=arguments.epochs,
        smoke=arguments.smoke,
        num_workers=default_workers() if arguments.workers is None else arguments.workers,
        num_rounds=1 if arguments.smoke else arguments.rounds,
        json=arguments.json,
        html=arguments.html,
    )
    try:
        return run_demo(options, out=sys.stdout, progress=sys.stderr)
    except UsageError as error:
        print(f"spdl-torch demo: {error}", file=sys.stderr)
        return 2


def _check_gpu(arguments: argparse.Namespace) -> int:
    from .check_gpu.command import CHECKS, CheckOptions, run_check_gpu

    unknown = [name for name in arguments.only if name not in CHECKS]
    problem = f"--only takes {', '.join(CHECKS)}, got {unknown[0]!r}" if unknown else None
    if arguments.data is not None and not arguments.data.is_dir():
        problem = f"{arguments.data} is not a folder"
    if arguments.json is not None and not arguments.json.parent.is_dir():
        problem = f"{arguments.json.parent} is not a folder to write to"
    if problem is not None:
        print(f"spdl-torch check-gpu: {problem}.", file=sys.stderr)
        return 2
    options = CheckOptions(arguments.data, arguments.json, arguments.only)
    return run_check_gpu(options, sys.stdout, sys.stderr)


def _photographs(arguments: argparse.Namespace) -> int:
    from .measuring.photographs import write_photographs

    folders = [arguments.folder / split for split in ("train", "val")]
    for folder in folders:
        if folder.exists():
            what = f"{folder} is there already. Remove it, or give another folder."
            print(f"spdl-torch photographs: {what}", file=sys.stderr)
            return 2
    try:
        for seed, folder in enumerate(folders):
            write_photographs(folder, arguments.count, seed=seed, num_classes=arguments.classes)
    except OSError as error:
        print(f"spdl-torch photographs: {error}", file=sys.stderr)
        return 2
    print(*folders, sep="\n")
    return 0


def _prepare(arguments: argparse.Namespace) -> int:
    from .prepare.command import PrepareOptions, UsageError, run_check, run_prepare
    from .prepare.plan import Settings

    try:
        if arguments.out is None:
            if arguments.verify == arguments.index:
                raise UsageError("OUT is missing. Without it, give either --verify or --index.")
            return run_check(arguments.source, sys.stdout, sys.stderr, writes_index=arguments.index)
        if arguments.index:
            raise UsageError("--index takes a folder of tars, and no OUT.")
        settings = Settings(
            resize=arguments.resize,
            quality=arguments.quality,
            shard_samples=arguments.shard_samples,
            shard_bytes=arguments.shard_bytes,
            seed=None if arguments.in_order else arguments.seed,
        )
        options = PrepareOptions(
            source=arguments.source,
            out=arguments.out,
            settings=settings,
            num_workers=arguments.workers,
            skips_bad=arguments.on_error == "skip",
        )
        status = run_prepare(options, sys.stdout, sys.stderr)
        if status == 0 and arguments.verify:
            status = run_check(arguments.out, sys.stdout, sys.stderr)
        return status
    except UsageError as error:
        print(f"spdl-torch prepare: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"spdl-torch prepare: {error}", file=sys.stderr)
        return 1


def _plot(arguments: argparse.Namespace) -> int:
    import sqlite3

    from .observe import plot_stats

    try:
        paths = plot_stats(
            arguments.db_path,
            arguments.output,
            stages=arguments.stages,
            start_time=arguments.start,
            end_time=arguments.end,
            run_id=arguments.run,
            file_format=arguments.format,
        )
    except (OSError, ValueError, ModuleNotFoundError, sqlite3.Error) as error:
        print(f"spdl-torch plot: {error}", file=sys.stderr)
        return 2
    print(*paths, sep="\n")
    return 0


def _report(arguments: argparse.Namespace) -> int:
    import sqlite3

    try:
        pairs = _runs_to_report(arguments)
        if arguments.html is not None:
            from .observe.page.document import write_page
            from .observe.trace.run_page import page_of

            print(write_page(page_of(pairs), arguments.html))
            return 0
    except (OSError, ValueError, ModuleNotFoundError, sqlite3.Error) as error:
        print(f"spdl-torch report: {error}", file=sys.stderr)
        return 2
    for run, other in pairs:
        _print_report(run, other, arguments.format, is_single=len(pairs) == 1)
    return 0


def _runs_to_report(arguments: argparse.Namespace) -> list[tuple[MeasuredRun, MeasuredRun | None]]:
    """Return the runs in the file, each with the run to compare it with, or None."""
    from .observe.trace.loading import load_runs, load_trace

    chosen = {"run_id": arguments.run, "pipeline": arguments.pipeline}
    runs = load_runs(arguments.db_path, **chosen)
    if arguments.trace is not None:
        if len(runs) > 1:
            raise ValueError(f"{arguments.db_path} has several pipelines: choose with --pipeline.")
        runs = [replace(runs[0], trace=load_trace(arguments.trace).trace)]
    if arguments.compare is None and arguments.compare_run is None:
        return [(run, None) for run in runs]
    path = arguments.compare or arguments.db_path
    others = load_runs(path, run_id=arguments.compare_run, pipeline=arguments.pipeline)
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
    from .observe.trace.run_page import comparison_of

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


def _watch(arguments: argparse.Namespace) -> int:
    import sqlite3

    from .observe.store.watching import watch

    try:
        watch(
            arguments.db_path,
            run_id=arguments.run,
            interval_seconds=arguments.interval,
            once=arguments.once,
            out=sys.stdout,
        )
    except (OSError, ValueError, sqlite3.Error) as error:
        if isinstance(error, BrokenPipeError):
            raise
        print(f"spdl-torch watch: {error}", file=sys.stderr)
        return 2
    return 0


def _trace(arguments: argparse.Namespace) -> int:
    from .observe import check_trace

    try:
        if arguments.output is None and (arguments.torch or len(arguments.traces) > 1):
            raise ValueError("several traces are merged into a file: name it with -o.")
        if arguments.output is not None:
            _merge(arguments.traces, arguments.torch, arguments.output)
        summary = check_trace(arguments.output or arguments.traces[0])
    except (OSError, ValueError) as error:
        print(f"spdl-torch trace: {error}", file=sys.stderr)
        return 2
    print(arguments.output or summary)
    return 0


def _merge(traces: Sequence[Path], torch_trace: Path | None, output: Path) -> None:
    from .observe import merge_ranks, merge_with_torch

    if torch_trace is None:
        merge_ranks(traces, output)
    elif len(traces) == 1 and not traces[0].is_dir():
        merge_with_torch(traces[0], torch_trace, output)
    else:
        with tempfile.TemporaryDirectory() as folder:
            ranks = Path(folder) / "ranks.json"
            merge_ranks(traces, ranks)
            merge_with_torch(ranks, torch_trace, output)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="spdl-torch",
        description="Loading on threads for PyTorch training.",
        formatter_class=partial(argparse.HelpFormatter, max_help_position=20),
    )
    parser.add_argument("--version", action="version", version=f"spdl-torch {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_demo(commands)
    _add_photographs(commands)
    _add_prepare(commands)
    _add_report(commands)
    _add_watch(commands)
    _add_plot(commands)
    _add_trace(commands)
    add_bench(commands)
    _add_check_gpu(commands)
    return parser


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    demo = commands.add_parser(
        "demo",
        help="load and train with torch's DataLoader and with ours, and compare",
        description="Load small pictures and photographs, alone and for two networks, with torch's "
        "DataLoader and with ours, each in a process of its own. Ends with tables: speed, waiting, "
        "the speed above which a model waits for each loader, CPU time, memory, the bottleneck. "
        "Takes about 90 seconds on 2 quiet cores.",
    )
    demo.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help="a folder with one folder of images per class; only these are measured "
        "(default: small pictures, and photographs made for the occasion, removed at the end)",
    )
    demo.add_argument(
        "--epochs",
        type=whole_number,
        metavar="N",
        help="train both networks N times on all the photographs (default: about a second on some)",
    )
    demo.add_argument(
        "--smoke", action="store_true", help="a run of 10 to 20 seconds that shows it works"
    )
    demo.add_argument(
        "--workers",
        type=whole_number,
        metavar="N",
        help="num_workers (default: one per core, 8 max)",
    )
    demo.add_argument(
        "--rounds",
        type=whole_number,
        metavar="N",
        default=2,
        help="runs of each loader (default: 2)",
    )
    demo.add_argument(
        "--json", type=Path, metavar="FILE", help="write every value of every round to this file"
    )
    demo.add_argument(
        "--html", type=Path, metavar="OUT", help="write the tables to this file, as a page"
    )
    demo.set_defaults(run_command=_demo)


def _add_check_gpu(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    check = commands.add_parser(
        "check-gpu",
        help="check that batches reach this machine's GPU whole, and how fast",
        description="Check batches on the GPU: correctness, races, exits, graph capture, memory, "
        "rates. Each line is NAME value limit PASS, FAIL or SKIP. Takes at most 9 minutes; the "
        "status is 0 if all pass, 1 if one fails, 2 if there is no GPU.",
    )
    check.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help="photographs to train on, one folder of images per class (default: made for the "
        "occasion, removed at the end)",
    )
    check.add_argument(
        "--json", type=Path, metavar="FILE", help="write the lines to this file, too"
    )
    check.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="GROUP",
        help="only these checks: correctness, races, exits, capture, memory, rates; may be given "
        "several times",
    )
    check.set_defaults(run_command=_check_gpu)


def _add_photographs(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    photographs = commands.add_parser(
        "photographs",
        help="write photograph-like JPEGs to try things out with",
        description="Write DIR/train and DIR/val, each with a folder for each class, as "
        "torchvision's ImageFolder reads them, and print the paths. Decoding one costs what "
        "decoding one of ImageNet's costs.",
    )
    photographs.add_argument("folder", type=Path, metavar="DIR", help="made if it does not exist")
    photographs.add_argument(
        "--count",
        type=whole_number,
        metavar="N",
        default=8,
        help="photographs in each of train and val (default: 8); a thousand take half a minute",
    )
    photographs.add_argument(
        "--classes", type=whole_number, metavar="N", default=2, help="folders in each (default: 2)"
    )
    photographs.set_defaults(run_command=_photographs)


def _add_prepare(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    prepare = commands.add_parser(
        "prepare",
        help="turn a folder of images, videos or arrays into tar shards with indexes",
        description="Write tar shards in WebDataset's layout, each with an index, from a folder "
        "of files or with a folder for each class. A run that was stopped goes on where it was "
        "when the same command is given again, and the bytes are those of one run.",
    )
    prepare.add_argument("source", type=Path, metavar="SRC", help="only read")
    prepare.add_argument(
        "out",
        type=Path,
        nargs="?",
        metavar="OUT",
        help="folder of the shards; left out with --verify or --index alone, which look at SRC",
    )
    prepare.add_argument(
        "--resize",
        type=whole_number,
        metavar="N",
        help="make JPEGs of images, with N pixels at the shorter edge; smaller ones keep theirs "
        "(default: files are copied as they are)",
    )
    prepare.add_argument(
        "--quality",
        type=_quality,
        metavar="Q",
        default=90,
        help="quality of these JPEGs, 1 to 100 (default: 90)",
    )
    prepare.add_argument(
        "--shard-samples",
        type=whole_number,
        metavar="N",
        default=10_000,
        help="samples in a shard, at most (default: 10000)",
    )
    prepare.add_argument(
        "--shard-bytes",
        type=whole_number,
        metavar="N",
        default=256_000_000,
        help="bytes of source files in a shard, at most (default: 256000000)",
    )
    prepare.add_argument(
        "--seed", type=int, metavar="N", default=0, help="seed of the samples' order (default: 0)"
    )
    prepare.add_argument("--in-order", action="store_true", help="leave the samples sorted by name")
    prepare.add_argument(
        "--on-error",
        choices=["raise", "skip"],
        default="raise",
        help="skip: leave out files that are damaged or not to be read; the index names them",
    )
    prepare.add_argument(
        "--workers",
        type=whole_number,
        metavar="N",
        help="threads that encode (default: one per core)",
    )
    prepare.add_argument(
        "--verify",
        action="store_true",
        help="read all shards back and compare them with their indexes",
    )
    prepare.add_argument(
        "--index", action="store_true", help="write the indexes that tars in SRC lack"
    )
    prepare.set_defaults(run_command=_prepare)


def _quality(text: str) -> int:
    """Parse a JPEG quality, 1 to 100."""
    if not text.isdecimal() or not 1 <= int(text) <= 100:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 to 100, got {text}")
    return int(text)


def _add_report(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    report = commands.add_parser(
        "report",
        help="say what held training back, from a statistics file or a trace",
        description="Name what held training back in a run, why, and what to do, with the figures "
        "of every stage: as a text, or as a page for a browser.",
    )
    _add_file_and_run(report, "statistics file, or trace")
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


def _add_watch(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    watch = commands.add_parser(
        "watch",
        help="follow a run in progress, in the terminal",
        description="Show what holds training back now, from the statistics file of a run that is "
        "going on, until it ends or Ctrl-C.",
    )
    _add_file_and_run(watch)
    watch.add_argument(
        "--interval",
        type=_seconds,
        metavar="S",
        default=2.0,
        help="seconds between two reads of the file (default: 2)",
    )
    watch.add_argument("--once", action="store_true", help="show it once, and end")
    watch.set_defaults(run_command=_watch)


def _seconds(text: str) -> float:
    """Parse a positive number of seconds."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be > 0 seconds, got {text}")
    return value


def _add_file_and_run(
    command: argparse.ArgumentParser, what: str = "statistics file that SQLiteStatsWriter wrote"
) -> None:
    command.add_argument("db_path", type=Path, metavar="FILE", help=what)
    command.add_argument(
        "--run",
        type=whole_number,
        metavar="ID",
        help="which run of several in the file (default: the last with figures)",
    )


def _add_plot(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    plot = commands.add_parser(
        "plot",
        help="draw what a statistics file holds: stages, queues, garbage collections",
        description="Draw the stages and the queues of a run, with the bottleneck, into two "
        "pictures, and print their paths. Times are seconds since 1970, dates "
        "(2026-01-31 12:00), or after the run's start (+90, +1.5min, +2h).",
    )
    _add_file_and_run(plot)
    plot.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path(),
        metavar="DIR",
        help="folder of the pictures (default: the current one)",
    )
    plot.add_argument(
        "--stage",
        dest="stages",
        nargs="+",
        action="extend",
        metavar="NAME",
        help="only these stages and their queues: decode, or 0:1:decode[10] (default: all)",
    )
    plot.add_argument("--start", metavar="TIME", help="draw from then on (default: the start)")
    plot.add_argument("--end", metavar="TIME", help="draw up to then (default: the end)")
    plot.add_argument(
        "--format", choices=["png", "svg", "pdf"], default="png", help="format of the pictures"
    )
    plot.set_defaults(run_command=_plot)


def _add_trace(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    trace = commands.add_parser(
        "trace",
        help="check a trace and sum it up, or merge traces of ranks and of torch",
        description="Check that a trace can be shown in full and print what is in it, with the "
        "verdict. With -o, combine the traces of several ranks, or one of ours with a trace "
        "of torch.profiler, and print the path.",
    )
    trace.add_argument(
        "traces",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="trace that Profile.write_trace wrote; with -o also several, or a folder of them",
    )
    trace.add_argument(
        "-o", "--output", type=Path, metavar="OUT", help="write the merged trace to this file"
    )
    trace.add_argument(
        "--torch", type=Path, metavar="TRACE", help="written by torch.profiler in the same process"
    )
    trace.set_defaults(run_command=_trace)


if __name__ == "__main__":
    sys.exit(main())
