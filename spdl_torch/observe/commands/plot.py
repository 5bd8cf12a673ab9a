"""``python -m spdl_torch plot``: pictures of a statistics file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from .run_options import add_file_and_run, prints

if TYPE_CHECKING:
    import argparse


def add_plot(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to those of ``spdl-torch``."""
    plot = commands.add_parser(
        "plot",
        help="draw what a statistics file holds: stages, queues, garbage collections",
        description="Draw the stages and the queues of a run, with the bottleneck, into two "
        "pictures, and print their paths. Times are seconds since 1970, dates "
        "(2026-01-31 12:00), or after the run's start (+90, +1.5min, +2h).",
    )
    add_file_and_run(plot)
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
    prints(plot, _plot)


def _plot(arguments: argparse.Namespace) -> list[Path]:
    from .. import plot_stats

    return plot_stats(
        arguments.db_path,
        arguments.output,
        stages=arguments.stages,
        start_time=arguments.start,
        end_time=arguments.end,
        run_id=arguments.run,
        file_format=arguments.format,
    )
