"""The options of ``python -m spdl_torch check-gpu``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ..command_options import CommandError

if TYPE_CHECKING:
    import argparse


def add_check_gpu(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to those of ``spdl-torch``."""
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
    check.add_argument(
        "--resume",
        action="store_true",
        help="go on where an earlier run was cut off: groups that the file of --json has whole are "
        "not run again",
    )
    check.set_defaults(run_command=_check_gpu)


def _check_gpu(arguments: argparse.Namespace) -> int:
    from .command import CHECKS, CheckOptions, run_check_gpu

    unknown = [name for name in arguments.only if name not in CHECKS]
    problem = f"--only takes {', '.join(CHECKS)}, got {unknown[0]!r}" if unknown else None
    if arguments.data is not None and not arguments.data.is_dir():
        problem = f"{arguments.data} is not a folder"
    if arguments.json is not None and not arguments.json.parent.is_dir():
        problem = f"{arguments.json.parent} is not a folder to write to"
    if arguments.resume and arguments.json is None:
        problem = "--resume takes up the file of --json, which is not given"
    if problem is not None:
        raise CommandError(f"{problem}.")
    options = CheckOptions(arguments.data, arguments.json, arguments.only, resumes=arguments.resume)
    return run_check_gpu(options, sys.stdout, sys.stderr)
