"""The options of ``python -m spdl_torch demo``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ..command_options import whole_number

if TYPE_CHECKING:
    import argparse


def add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to those of ``spdl-torch``."""
    demo = commands.add_parser(
        "demo",
        help="load and train with torch's DataLoader and with ours, and compare",
        description="Load small pictures and photographs, alone and for a light network, with "
        "torch's DataLoader and with ours, each in a process of its own. Ends with tables: speed, "
        "waiting, CPU time, the speed above which a model waits for each loader, and what holds "
        "ours back. On a GPU it also checks that batches arrive there whole. Takes about a minute "
        "on 2 quiet cores.",
    )
    demo.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help="a folder with one folder of images per class; only these are measured "
        "(default: small pictures, and photographs made for the occasion, removed at the end)",
    )
    demo.add_argument(
        "--smoke", action="store_true", help="a run of 10 to 20 seconds that shows it works"
    )
    demo.add_argument(
        "--workers",
        type=whole_number,
        metavar="N",
        help="num_workers (default: one per core, 8 max)",
    )
    demo.add_argument(
        "--rounds",
        type=whole_number,
        metavar="N",
        default=5,
        help="turns of each loader (default: 5)",
    )
    demo.set_defaults(run_command=_demo)


def _demo(arguments: argparse.Namespace) -> int:
    from .command import Demo

    how_long = "10 to 20 seconds." if arguments.smoke else "About a minute."
    print(f"{how_long} Ctrl-C ends it early, with tables of what was measured.", file=sys.stderr)
    demo = Demo(
        arguments.data,
        arguments.workers,
        1 if arguments.smoke else arguments.rounds,
        smoke=arguments.smoke,
        out=sys.stdout,
        progress=sys.stderr,
    )
    return demo.run()
