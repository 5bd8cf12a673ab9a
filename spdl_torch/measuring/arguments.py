"""The options of ``python -m spdl_torch photographs``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..command_options import CommandError, whole_number

if TYPE_CHECKING:
    import argparse


def add_photographs(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to those of ``spdl-torch``."""
    photographs = commands.add_parser(
        "photographs",
        help="write photograph-like JPEGs to try things out with",
        description="Write DIR/train and DIR/val, each with a folder for each class, as "
        "torchvision's ImageFolder reads them, and print the paths. Decoding one costs what "
        "decoding one of ImageNet's costs.",
    )
    photographs.add_argument("folder", type=Path, metavar="DIR", help="made if it does not exist")
    photographs.add_argument(
        "--count",
        type=whole_number,
        metavar="N",
        default=8,
        help="photographs in each of train and val (default: 8); a thousand take half a minute",
    )
    photographs.add_argument(
        "--classes", type=whole_number, metavar="N", default=2, help="folders in each (default: 2)"
    )
    photographs.set_defaults(run_command=_photographs)


def _photographs(arguments: argparse.Namespace) -> int:
    from .photographs import write_photographs

    folders = [arguments.folder / split for split in ("train", "val")]
    for folder in folders:
        if folder.exists():
            raise CommandError(f"{folder} is there already. Remove it, or give another folder.")
    try:
        for seed, folder in enumerate(folders):
            write_photographs(folder, arguments.count, seed=seed, num_classes=arguments.classes)
    except OSError as error:
        raise CommandError(error) from error
    print(*folders, sep="\n")
    return 0
