"""The command line: ``python -m spdl_torch demo``, ``report``, ``plot``, ``trace``, ``bench`` and
``photographs``."""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from . import __version__
from .bench.arguments import add_bench, whole_number

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in ``argv``; return its exit status.

    argv: None = this process's arguments. Then SIGTERM ends it as Ctrl-C does: with what there is.
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
    """Whether nobody reads stdout any more, as behind ``| head``; then what is left is dropped."""
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
    )
    try:
        return run_demo(options, out=sys.stdout, progress=sys.stderr)
    except UsageError as error:
        print(f"spdl-torch demo: {error}", file=sys.stderr)
        return 2


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

    from .observe import pipelines_of_file, report_of_file

    path, run_id = arguments.db_path, arguments.run
    try:
        names = pipelines_of_file(path, run_id=run_id)
        chosen: list[int | None] = [*names] or [None]
        if arguments.pipeline is not None:
            chosen = [arguments.pipeline]
        reports = {n: report_of_file(path, run_id=run_id, pipeline=n) for n in chosen}
    except (OSError, ValueError, sqlite3.Error) as error:
        print(f"spdl-torch report: {error}", file=sys.stderr)
        return 2
    for number, report in reports.items():
        if len(reports) > 1 and arguments.format == "text":
            print(f"PIPELINE {number} {names.get(number or 0) or ''}".rstrip())
        print(report.as_json() if arguments.format == "json" else report)
        if len(reports) > 1 and arguments.format == "text":
            print()
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
    _add_report(commands)
    _add_plot(commands)
    _add_trace(commands)
    add_bench(commands)
    return parser


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    demo = commands.add_parser(
        "demo",
        help="train resnet18 with torch's DataLoader and with ours, and compare",
        description="Train resnet18 with torch's DataLoader and with ours, each in a process of "
        "its own, and end with a table: speed, waiting, CPU time, memory, and the bottleneck. That "
        "takes about 2 minutes on 2 cores; how long here is said when the images are there.",
    )
    demo.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help="a folder with one folder of images per class (default: photographs made for the "
        "occasion, removed at the end)",
    )
    demo.add_argument(
        "--epochs",
        type=whole_number,
        metavar="N",
        help="train N times on all the images (default: on a few hundred of them)",
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
    demo.set_defaults(run_command=_demo)


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


def _add_report(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    report = commands.add_parser(
        "report",
        help="say what held training back, from a statistics file",
        description="Name what held training back in a run, why, and what to do, with the figures "
        "of every stage.",
    )
    _add_file_and_run(report)
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
    report.set_defaults(run_command=_report)


def _add_file_and_run(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "db_path", type=Path, metavar="FILE", help="statistics file that SQLiteStatsWriter wrote"
    )
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
        *("-o", "--output"),
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
        "--format", choices=["png", "svg", "pdf"], default="png", help="of the pictures"
    )
    plot.set_defaults(run_command=_plot)


def _add_trace(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    trace = commands.add_parser(
        "trace",
        help="check a trace and sum it up, or merge traces of ranks and of torch",
        description="Check that a trace can be shown in full and print what is in it, with the "
        "verdict. With -o, lay the traces of several ranks over each other, or one beside a trace "
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
        *("-o", "--output"), type=Path, metavar="OUT", help="write the merged trace to this file"
    )
    trace.add_argument(
        "--torch", type=Path, metavar="TRACE", help="written by torch.profiler in the same process"
    )
    trace.set_defaults(run_command=_trace)


if __name__ == "__main__":
    sys.exit(main())
