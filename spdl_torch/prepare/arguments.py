"""The commands before training: ``prepare`` with its options, and ``build-kernel``."""

from __future__ import annotations

from argparse import ArgumentTypeError
from pathlib import Path
from subprocess import CalledProcessError
from typing import TYPE_CHECKING, Any

from ..command_options import CommandError, whole_number
from ..machine.limits import whole_cores

if TYPE_CHECKING:
    import argparse


def add_prepare(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to those of ``spdl-torch``."""
    prepare = commands.add_parser(
        "prepare",
        help="turn a folder of images, videos or arrays into tar shards with indexes",
        description="Write tar shards in WebDataset's layout, each with an index, from a folder "
        "of files or with a folder for each class. A run that was stopped goes on where it was "
        "when the same command is given again.",
    )
    add = prepare.add_argument
    count: dict[str, Any] = {"type": whole_number, "metavar": "N"}
    add("source", type=Path, metavar="SRC", help="only read; tars, with --verify or --index alone")
    add("out", type=Path, nargs="?", metavar="OUT", help="folder of the shards")
    add("--resize", **count, help="images become JPEGs with N pixels at the shorter edge, at most")
    add("--quality", type=_quality, metavar="Q", default=90, help="of these, 1 to 100 (90)")
    add("--shard-samples", **count, default=10_000, help="samples in a shard, at most (10000)")
    add("--workers", **count, default=whole_cores(), help="threads that encode (one per core)")
    add("--on-error", choices=["raise", "skip"], default="raise", help="skip: leave bad files out")
    add("--verify", action="store_true", help="read all shards back, and compare with the indexes")
    add("--index", action="store_true", help="write the indexes that tars in SRC lack")
    prepare.set_defaults(run_command=_prepare)


def add_build_kernel(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to those of ``spdl-torch``."""
    build = commands.add_parser(
        "build-kernel",
        help="compile what loads photographs, for a torch without TorchScript",
        description="Compile the kernel that loads batches of photographs as an extension of the "
        "torch that is installed, beside the package. From then on programs use it, instead of "
        "TorchScript or Python. The compiler is c++, or what CXX names.",
    )
    build.set_defaults(run_command=_build_kernel)


def _quality(text: str) -> int:
    """Parse a JPEG quality, 1 to 100."""
    if not text.isdecimal() or not 1 <= int(text) <= 100:
        raise ArgumentTypeError(f"must be a whole number from 1 to 100, got {text}")
    return int(text)


def _prepare(options: argparse.Namespace) -> int:
    from .shards import check_shards, write_shards

    if options.out is None and options.verify == options.index:
        raise CommandError("OUT is missing. Without it, give either --verify or --index.")
    if options.out is not None and options.index:
        raise CommandError("--index takes a folder of tars, and no OUT.")
    try:
        if options.out is None:
            return check_shards(options.source, writes_indexes=options.index)
        write_shards(options)
        return check_shards(options.out, writes_indexes=False) if options.verify else 0
    except OSError as error:
        raise CommandError(error, status=1) from error


def _build_kernel(_: argparse.Namespace) -> int:
    from ..io._image import extension

    try:
        path = extension.build()
    except (OSError, CalledProcessError) as error:
        raise CommandError(
            f"{error}. It takes a compiler of C++20, such as Debian's g++ or Xcode's tools (CXX "
            "may name another), and the right to write beside the package. Photographs are loaded "
            "as before.",
            status=1,
        ) from error
    if extension.load() is None:
        raise CommandError(f"{path} cannot be loaded, and is not used.", status=1)
    print(path)
    return 0
