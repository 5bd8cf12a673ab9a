"""``python -m spdl_torch run``: its options, what it sets up around the program, and
``--compare``: the program in turns, with torch's loader and with ours.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import pickle
import re
import subprocess
import sys
import tempfile
from contextlib import suppress
from multiprocessing import spawn
from pathlib import Path
from statistics import geometric_mean, mean
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


_TURNS = ("torch", "ours", "ours", "torch")  # so that a machine that slows down favours neither
_TURN = "import pickle, sys; it = pickle.loads(bytes.fromhex(sys.argv[1])); it.run_command(it)"


def compare(options: argparse.Namespace) -> int:
    """Run the program in turns, print what each loop gained, and return the exit status.

    Raises: CommandError: it runs on several ranks, or a turn failed.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise CommandError("--compare is for one rank: run it without torchrun.")
    print(
        f"spdl-torch run: the program runs {len(_TURNS)} times, each time until its loops have "
        f"run for {options.compare} s. What it writes, sends or deletes, it does each time.",
        file=sys.stderr,
    )
    found: dict[str, list[dict[str, float]]] = {"torch": [], "ours": []}
    for number, options.loader in enumerate(_TURNS, 1):
        print(f"spdl-torch run: turn {number}: {options.loader}", file=sys.stderr, flush=True)
        found[options.loader].append(_turn(options, number))

    if not any("batches/s" in name for name in found["torch"][0]):
        print("spdl-torch run: no loader has given two batches.", file=sys.stderr)
    width = max(map(len, found["torch"][0]), default=0)
    print(f"{'':{width}}{'torch':>22}{'ours':>22}  ours/torch")
    for name in found["torch"][0]:
        with suppress(KeyError):  # not in every turn
            rows = ([each[name] for each in turns] for turns in found.values())
            print(f"{name:{width}}{_cells(*rows)}")
    return 0


def _turn(options: argparse.Namespace, number: int) -> dict[str, float]:
    """Run the program once; return its figures by their names."""
    with tempfile.TemporaryDirectory(prefix="spdl-torch-run-") as folder:
        options.folder = Path(folder)
        packed = pickle.dumps(options).hex()
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        turn = subprocess.Popen([sys.executable, *flags, "-c", _TURN, packed])
        peak = 0
        while turn.poll() is None:
            peak = max(peak, _bytes_of(turn.pid))
            with suppress(subprocess.TimeoutExpired):
                turn.wait(0.5)
        if turn.returncode:
            raise CommandError(f"turn {number} ended with status {turn.returncode}.", 1)
        figures: dict[str, float] = {}
        for file in sorted(options.folder.iterdir()):  # of each process of the program
            figures |= json.loads(file.read_text())
    return figures | ({"peak memory, MiB": peak / 2**20} if peak else {})


def _bytes_of(pid: int) -> int:
    """Return the memory of a process and of those below it; what several share is divided among
    them. They may end, and only Linux shows it: 0 = unknown."""
    with suppress(OSError):
        pages = re.findall(r"^Pss: +(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.M)
        below = [file.read_text() for file in Path(f"/proc/{pid}/task").glob("*/children")]
        return 1024 * sum(map(int, pages)) + sum(map(_bytes_of, map(int, " ".join(below).split())))
    return 0


def _cells(torchs: list[float], ours: list[float]) -> str:
    """Return means of the turns with half of what is between them, and the turns' ratios."""
    spreads = ((mean(each), (max(each) - min(each)) / 2) for each in (torchs, ours))
    cells = "".join(f"{f'{_shown(middle)} ±{_shown(half)}':>22}" for middle, half in spreads)
    ratios = [b / a for a, b in zip(torchs, ours, strict=True)]
    return f"{cells}  {geometric_mean(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


def _shown(figure: float) -> str:
    return f"{figure:,.0f}" if figure >= 1000 else f"{figure:.4g}"
