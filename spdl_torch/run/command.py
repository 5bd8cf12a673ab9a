"""``python -m spdl_torch run``: its options, and what it sets up around the program."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from multiprocessing import spawn
from pathlib import Path
from typing import Any

from ..command_options import CommandError, whole_number
from .program import path_of, run_program


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
    both = run.add_mutually_exclusive_group().add_argument
    both("--loader", choices=["ours", "torch"], help="torch: only watch torch's (default: ours)")
    both("--compare", type=whole_number, metavar="SECONDS", help="torch's and ours in turns")
    add("--html", type=Path, metavar="FILE", help="write the reports to a page, too")
    add("--record", type=Path, metavar="FILE", help="write a statistics file, for report and plot")
    add("-m", dest="module", nargs=rest, metavar="MODULE", help="run a module, as python -m does")
    add("-c", dest="code", nargs=rest, help=argparse.SUPPRESS)
    add("program", nargs=rest, help="a script, and its arguments")
    run.set_defaults(run_command=_run, folder=None)  # folder: of the figures of a turn


def _run(options: argparse.Namespace) -> int:
    if options.module:  # of which argparse takes "--" for the end
        options.module, options.program = options.module + options.program, []
    elif options.program[:1] == ["--"]:
        options.program = options.program[1:]
    if options.code or options.program[:1] == ["-"]:
        raise CommandError("code of -c or of standard input is not run: write it to a file.")
    if not (options.module or options.program):
        raise CommandError("expected a program, or -m and a module. run --help shows how.")
    if (options.html or options.record) and (options.compare or options.loader == "torch"):
        raise CommandError("--html and --record are for a run with our loader alone.")
    if not options.module and not os.access(path := path_of(options.program[0]), os.R_OK):
        raise CommandError(f"can't open file {path!r}: it is missing, or not for you to read.")
    if options.compare and not options.folder:
        from .turns import compare

        return compare(options)
    Exchange(options)
    run_program(options.module or options.program, is_module=bool(options.module))
    return 0


class Exchange:
    """Exchange torch's loader in this process and its children when torch has been imported, at
    once if it has been: a program may set environment variables first that torch reads then."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options, prepare = options, spawn.get_preparation_data
        # A child that is not forked unpickles what this returns before it imports the program.
        spawn.get_preparation_data = lambda name: {**prepare(name), "spdl_torch": self}
        if "torch" in sys.modules:
            self._exchange()
        else:
            sys.meta_path.insert(0, self)

    def __reduce__(self) -> tuple[object, ...]:
        return Exchange, (self._options,)

    def find_spec(self, name: str, *_: object) -> Any:
        """Return torch's spec, once; None for another module."""
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        if spec is not None:
            load = spec.loader.exec_module

            def execute(module: object) -> None:
                load(module)
                self._exchange()

            spec.loader.exec_module = execute
        return spec

    def _exchange(self) -> None:
        from .loaders import exchange_loader  # imports torch

        exchange_loader(self._options)
