"""The options of ``python -m spdl_torch prepare``."""

from __future__ import annotations

import sys
from argparse import ArgumentTypeError
from pathlib import Path
from typing import TYPE_CHECKING

from ..command_options import CommandError, whole_number

if TYPE_CHECKING:
    import argparse


def add_prepare(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to those of ``spdl-torch``."""
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
        "--seed", type=int, metavar="N", default=0, help="seed of the samples' order (default: 0)"
    )
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
        raise ArgumentTypeError(f"must be a whole number from 1 to 100, got {text}")
    return int(text)


def _prepare(arguments: argparse.Namespace) -> int:
    from .command import run_check, run_prepare

    try:
        if arguments.out is None:
            if arguments.verify == arguments.index:
                raise CommandError("OUT is missing. Without it, give either --verify or --index.")
            return run_check(arguments.source, sys.stdout, sys.stderr, writes_index=arguments.index)
        if arguments.index:
            raise CommandError("--index takes a folder of tars, and no OUT.")
        status = run_prepare(arguments, sys.stdout, sys.stderr)
        if status == 0 and arguments.verify:
            status = run_check(arguments.out, sys.stdout, sys.stderr)
        return status
    except OSError as error:
        raise CommandError(error, status=1) from error
