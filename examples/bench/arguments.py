"""The command line: its options, and what becomes of them."""

from __future__ import annotations

import signal
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path
from threading import TIMEOUT_MAX
from typing import TYPE_CHECKING

from spdl_torch.command_options import whole_number
from spdl_torch.shown_text import printable

from .command import list_tables, run_bench
from .tables import TABLES, BenchOptions, load_table

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the table that ``argv`` names; return the exit status.

    argv: None = this process's arguments; SIGTERM then ends the run as Ctrl-C does, with the
        results so far.
    """
    if argv is None:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    arguments = parser().parse_args(argv)
    try:
        if arguments.list:
            return list_tables(sys.stdout)
        if arguments.table is None:
            raise ValueError("name a table, or --list them.")
        return run_bench(options_of(arguments), sys.stdout, sys.stderr)
    except KeyboardInterrupt:
        return 130
    except (OSError, ValueError, SystemExit) as error:  # a folder without data ends the examples
        print(f"bench: {printable(str(error))}", file=sys.stderr)
        return 2


def parser() -> ArgumentParser:
    """Return a parser of the options."""
    bench = ArgumentParser(
        prog="bench",
        description="Measure one table: every contender in a process of its own, in interleaved "
        "rounds; print medians with the spread, ratios and goals. That takes about rounds x "
        "contenders x (--seconds + 4 s), 2 to 60 minutes, which is said at the start. A peer that "
        "is not installed is left out, and a line says how to install it.",
    )
    bench.add_argument("table", nargs="?", metavar="TABLE", help=", ".join(TABLES))
    bench.add_argument("--list", action="store_true", help="list tables and contenders, and end")
    bench.add_argument(
        "--rounds",
        type=whole_number,
        metavar="N",
        help="how often each contender is measured (default: 5; 1 with --smoke)",
    )
    bench.add_argument(
        "--seconds",
        type=_positive_seconds,
        default=2.0,
        metavar="S",
        help="about how long a pass takes torch's DataLoader; sets the samples of all "
        "contenders (default: 2)",
    )
    bench.add_argument(
        "--workers",
        type=whole_number,
        nargs="+",
        metavar="N",
        help="num_workers (default: 2; for ordinary, which measures 0, too: 2 4)",
    )
    bench.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help="photographs (one folder of JPEGs per class) or, for clips, videos "
        "(default: made for the occasion, removed at the end)",
    )
    bench.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="NAME",
        help="only this contender, or those whose names begin so; may be given several times",
    )
    bench.add_argument("--goals", action="store_true", help="only contenders that a goal compares")
    bench.add_argument("--peer", metavar="NAME", help="whose figures the last column divides by")
    bench.add_argument("--full", action="store_true", help="the sizes that take long, too")
    bench.add_argument("--smoke", action="store_true", help="a run of seconds that shows it works")
    bench.add_argument(
        "--limit",
        type=_positive_seconds,
        default=120.0,
        metavar="S",
        help="a measurement that takes longer has failed (default: 120)",
    )
    bench.add_argument("--json", type=Path, metavar="FILE", help="write every value to FILE")
    bench.add_argument(
        "--picture", type=Path, metavar="FILE", help="draw the table: .png, .svg or .pdf"
    )
    return bench


def options_of(arguments: Namespace) -> BenchOptions:
    """Return the options of a table. Raises: ValueError: there is no such table."""
    workers = arguments.workers or load_table(arguments.table).workers
    return BenchOptions(
        table=arguments.table,
        rounds=arguments.rounds or (1 if arguments.smoke else 5),
        seconds=arguments.seconds,
        num_workers=workers[0],
        more_workers=tuple(workers[1:]),
        data=arguments.data,
        only=tuple(arguments.only),
        goals_only=arguments.goals,
        full=arguments.full,
        smoke=arguments.smoke,
        peer=arguments.peer,
        limit_seconds=arguments.limit,
        json=arguments.json,
        picture=arguments.picture,
    )


def _positive_seconds(text: str) -> float:
    """Parse an option's value, a number of seconds above 0 that a thread can wait for."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= TIMEOUT_MAX:
        raise ArgumentTypeError(f"must be seconds above 0, and finite, got {text}")
    return value
