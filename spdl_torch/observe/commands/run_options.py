"""What the commands share: the options that choose a file and a run in it, and how they end."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...command_options import CommandError, whole_number

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable


def add_file_and_run(
    command: argparse.ArgumentParser,
    what: str = "statistics file that SQLiteStatsWriter wrote",
    *,
    several: bool = False,
) -> None:
    """Add the file or files, and ``--run``."""
    number: dict[str, Any] = {"nargs": "+"} if several else {}
    command.add_argument("db_path", type=Path, metavar="FILE", help=what, **number)
    command.add_argument(
        "--run",
        type=whole_number,
        metavar="ID",
        help="which run of several in the file (default: the last with figures)",
    )


def prints(
    command: argparse.ArgumentParser, texts_of: Callable[[argparse.Namespace], Iterable[object]]
) -> None:
    """Let a command print these texts, one below the other, or say in one what is wrong."""
    command.set_defaults(run_command=partial(_run, texts_of))


def _run(
    texts_of: Callable[[argparse.Namespace], Iterable[object]], arguments: argparse.Namespace
) -> int:
    import sqlite3

    try:
        texts = texts_of(arguments)
    except (OSError, ValueError, ModuleNotFoundError, sqlite3.Error) as error:
        raise CommandError(error) from error
    print(*texts, sep="\n")
    return 0
