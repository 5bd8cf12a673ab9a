"""``python -m spdl_torch run``: its options, and what it sets up around the program."""

from __future__ import annotations

import argparse
import os
from multiprocessing import spawn
from pathlib import Path

from ..command_options import CommandError, whole_number
from .program import after_torch, path_of, run_program


def add_run(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to those of ``spdl-torch``."""
    run = commands.add_parser(
        "run",
        usage="spdl-torch run [options] {PROGRAM | -m MODULE} [ARGS...]",
        help="run a program of yours with our loader, and say what holds its training back",
        description="Run a program as Python would, with our DataLoader wherever it imports "
        "torch's. At its end, standard error has a report and the edit that keeps our loader.",
    )
    add, rest = run.add_argument, argparse.REMAINDER
    add("--loader", choices=["ours", "torch"], default="ours", help="torch: only watch torch's")
    add("--compare", type=whole_number, metavar="SECONDS", help="torch's and ours in turns")
    add("--html", type=Path, metavar="FILE", help="write the reports to a page, too")
    add("--record", type=Path, metavar="FILE", help="write a statistics file, for report and plot")
    add("-m", dest="module", nargs=rest, metavar="MODULE", help="run a module, as python -m does")
    add("-c", dest="code", nargs=rest, help=argparse.SUPPRESS)
    add("program", nargs=rest, help="a script, and its arguments")
    run.set_defaults(run_command=_run, folder=None)  # folder: of the figures of a turn


def _run(options: argparse.Namespace) -> int:
    if options.code or options.program[:1] == ["-"]:
        raise CommandError("code of -c or of standard input is not run: write it to a file.")
    if not (options.module or options.program):
        raise CommandError("expected a program, or -m and a module. run --help shows how.")
    if (options.html or options.record) and (options.compare or options.loader == "torch"):
        raise CommandError("--html and --record are for a run with our loader alone.")
    if not options.module and not os.access(path := path_of(options.program[0]), os.R_OK):
        raise CommandError(f"can't open file {path!r}: it is missing, or not for you to read.")
    for written in filter(None, (options.html, options.record)):
        _check_writable(written)
    if options.record and options.record.is_file():
        with options.record.open("rb") as file:
            if file.read(6) not in (b"", b"SQLite"):
                raise CommandError(f"--record: {options.record} is there, and no statistics file.")
    if options.compare and not options.folder:
        from .turns import compare

        return compare(options)
    begin(options)
    run_program(options.module or options.program, is_module=bool(options.module))
    return 0


def _check_writable(path: Path) -> None:
    """Say before the program runs what would only be found at its end."""
    folder = next(each for each in path.absolute().parents if each.exists())
    if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise CommandError(f"can't write file '{path}': it is a folder, or not for you to write.")


def begin(options: argparse.Namespace) -> None:
    """Exchange torch's loader in this process and its children, from the import of torch on."""

    def exchange() -> None:
        from .loaders import exchange_loader  # imports torch

        exchange_loader(options)

    def prepared(name: str) -> dict[str, object]:
        return {**prepare(name), "spdl_torch": _InChild(options)}

    # A child that is not forked unpickles what this returns before it imports the program.
    prepare, spawn.get_preparation_data = spawn.get_preparation_data, prepared
    after_torch(exchange)


class _InChild:
    """Begins where it is unpickled."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options

    def __reduce__(self) -> tuple[object, ...]:
        return begin, (self._options,)
