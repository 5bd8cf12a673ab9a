"""``python -m spdl_torch trace``: the report in a trace, and merged traces."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from .run_options import prints

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence


def add_trace(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to those of ``spdl-torch``."""
    trace = commands.add_parser(
        "trace",
        help="print the report in a trace, or merge traces of ranks and of torch",
        description="Print the report in a trace. With -o, combine the traces of several ranks, or "
        "one of ours with a trace of torch.profiler, and print the path.",
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
    prints(trace, _texts_of)


def _texts_of(arguments: argparse.Namespace) -> list[object]:
    from ..trace.json_file import profiles_of, read, report_in

    if arguments.output is not None:
        _merge(arguments.traces, arguments.torch, arguments.output)
        return [arguments.output]
    if arguments.torch:
        raise ValueError("--torch merges two traces into a file: name it with -o.")
    if len(arguments.traces) > 1:
        raise ValueError("several traces are merged into a file: name it with -o.")
    (path,) = arguments.traces
    reports = (report_in(profile, path) for profile in profiles_of(read(path), path))
    return ["\n\n".join(map(str, reports))]


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
