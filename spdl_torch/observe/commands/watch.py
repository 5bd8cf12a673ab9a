"""``python -m spdl_torch watch``: a run in progress, in the terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from ...command_options import CommandError, positive_seconds
from .run_options import add_file_and_run

if TYPE_CHECKING:
    import argparse


def add_watch(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to those of ``spdl-torch``."""
    watch = commands.add_parser(
        "watch",
        help="follow a run in progress, in the terminal",
        description="Show what holds training back now, from the statistics file of a run that is "
        "going on, until it ends or Ctrl-C.",
    )
    add_file_and_run(watch)
    watch.add_argument(
        "--interval",
        type=positive_seconds,
        metavar="S",
        default=2.0,
        help="seconds between two reads of the file (default: 2)",
    )
    watch.add_argument("--once", action="store_true", help="show it once, and end")
    watch.set_defaults(run_command=_watch)


def _watch(arguments: argparse.Namespace) -> int:
    import sqlite3

    from ..store.watching import watch

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
        raise CommandError(error) from error
    return 0
