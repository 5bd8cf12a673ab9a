"""``python -m spdl_torch trace``: traces, checked, summed up and merged."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from ...command_options import CommandError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence


def add_trace(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to those of ``spdl-torch``."""
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


def _trace(arguments: argparse.Namespace) -> int:
    from .. import check_trace

    try:
        if arguments.output is None and arguments.torch:
            raise ValueError("--torch merges two traces into a file: name it with -o.")
        if arguments.output is None and len(arguments.traces) > 1:
            raise ValueError("several traces are merged into a file: name it with -o.")
        if arguments.output is not None:
            _merge(arguments.traces, arguments.torch, arguments.output)
        summary = check_trace(arguments.output or arguments.traces[0])
    except (OSError, ValueError) as error:
        raise CommandError(error) from error
    print(arguments.output or summary)
    return 0


def _merge(traces: Sequence[Path], torch_trace: Path | None, output: Path) -> None:
    from .. import merge_ranks, merge_with_torch

    if torch_trace is None:
        merge_ranks(traces, output)
    elif len(traces) == 1 and not traces[0].is_dir():
        merge_with_torch(traces[0], torch_trace, output)
    else:
        with tempfile.TemporaryDirectory() as folder:
            ranks = Path(folder) / "ranks.json"
            merge_ranks(traces, ranks)
            merge_with_torch(ranks, torch_trace, output)
