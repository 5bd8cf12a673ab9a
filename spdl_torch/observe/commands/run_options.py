"""The options with which a command chooses a file and a run in it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...command_options import whole_number

if TYPE_CHECKING:
    import argparse


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
