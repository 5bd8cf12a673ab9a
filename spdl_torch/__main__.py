"""The command line: ``python -m spdl_torch demo``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in ``argv`` (default: this process's arguments); return its exit status."""
    try:
        arguments = _parser().parse_args(argv)
        return _demo(arguments)
    except KeyboardInterrupt:
        return 130


def _demo(arguments: argparse.Namespace) -> int:
    from .demo.command import DemoOptions, UsageError, default_workers, run_demo

    options = DemoOptions(
        data=arguments.data,
        epochs=arguments.epochs,
        smoke=arguments.smoke,
        num_workers=default_workers() if arguments.workers is None else arguments.workers,
        num_rounds=1 if arguments.smoke else arguments.rounds,
    )
    try:
        return run_demo(options, out=sys.stdout, progress=sys.stderr)
    except UsageError as error:
        print(f"spdl-torch demo: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="spdl-torch", description="Loading on threads for PyTorch training."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    demo = commands.add_parser(
        "demo",
        help="train resnet18 with torch's DataLoader and with ours, and compare",
        description="Train resnet18 with torch's DataLoader and with ours, each in a process of "
        "its own, and end with a table: speed, waiting, CPU time, memory, and the bottleneck.",
    )
    demo.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help="a folder with one folder of images per class (default: photographs made for the "
        "occasion, removed at the end)",
    )
    demo.add_argument(
        "--epochs",
        type=_positive,
        metavar="N",
        help="train N times on all the images (default: on a few hundred of them)",
    )
    demo.add_argument("--smoke", action="store_true", help="a short run that shows it works")
    demo.add_argument(
        "--workers", type=_positive, metavar="N", help="num_workers (default: one per core, 8 max)"
    )
    demo.add_argument(
        "--rounds", type=_positive, metavar="N", default=2, help="runs of each loader (default: 2)"
    )
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {value}")
    return value


if __name__ == "__main__":
    sys.exit(main())
