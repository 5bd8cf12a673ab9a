"""The command line."""

from __future__ import annotations

import signal
import sys
from argparse import ArgumentParser, ArgumentTypeError
from pathlib import Path
from threading import TIMEOUT_MAX
from typing import TYPE_CHECKING

from spdl_torch.command_options import whole_number
from spdl_torch.shown_text import printable

from .command import list_tables, run_bench
from .tables import TABLES, BenchOptions

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the table that ``argv`` names; return the exit status.

    argv: None = this process's arguments; SIGTERM then ends the run as Ctrl-C does, with the
        results so far.
    """
    if argv is None:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    arguments = vars(parser().parse_args(argv))
    try:
        if arguments.pop("list"):
            return list_tables(sys.stdout)
        if arguments["table"] is None:
            raise ValueError("name a table, or --list them.")
        return run_bench(BenchOptions(**arguments), sys.stdout, sys.stderr)
    except KeyboardInterrupt:
        return 130
    except (OSError, ValueError, SystemExit) as error:  # a folder without data ends the examples
        print(f"bench: {printable(str(error))}", file=sys.stderr)
        return 2


def parser() -> ArgumentParser:
    """Return a parser of the fields of ``BenchOptions``."""
    bench = ArgumentParser(
        prog="bench",
        description="Measure one table: every contender in a process of its own, in interleaved "
        "rounds; print medians with the spread, ratios and goals. That takes about rounds x "
        "contenders x (--seconds + 4 s), 2 to 60 minutes, which is said at the start. A peer that "
        "is not installed is left out, and a line says how to install it.",
    )
    add = bench.add_argument
    add("table", nargs="?", metavar="TABLE", help=", ".join(TABLES))
    add("--list", action="store_true", help="list tables and contenders, and end")
    rounds = "how often each contender is measured (default: 5; 1 with --smoke)"
    add("--rounds", type=whole_number, metavar="N", help=rounds)
    seconds = (
        "about how long a pass takes torch's DataLoader; sets everybody's samples (default: 2)"
    )
    add("--seconds", type=_positive_seconds, default=2.0, metavar="S", help=seconds)
    workers = "num_workers (default: 2; for ordinary, which measures 0, too: 2 4)"
    add("--workers", type=whole_number, nargs="+", default=(), metavar="N", help=workers)
    data = "photographs (one folder of JPEGs per class) or, for clips, videos (default: made)"
    add("--data", type=Path, metavar="DIR", help=data)
    only = "only this contender, or those whose names begin so; may be given several times"
    add("--only", action="append", default=[], metavar="NAME", help=only)
    add("--goals", action="store_true", help="only contenders that a goal compares")
    add("--peer", metavar="NAME", help="whose figures the last column divides by")
    add("--full", action="store_true", help="the sizes that take long, too")
    add("--smoke", action="store_true", help="a run of seconds that shows it works")
    limit = "a measurement that takes longer has failed (default: 120)"
    add("--limit", type=_positive_seconds, default=120.0, metavar="S", help=limit)
    add("--json", type=Path, metavar="FILE", help="write every value to FILE")
    return bench


def _positive_seconds(text: str) -> float:
    """Parse an option's value, a number of seconds above 0 that a thread can wait for."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= TIMEOUT_MAX:
        raise ArgumentTypeError(f"must be seconds above 0, and finite, got {text}")
    return value
