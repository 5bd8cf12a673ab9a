"""``run --compare``: the program in turns, with torch's loader and with ours."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from statistics import geometric_mean, mean
from typing import TYPE_CHECKING

from ..command_options import CommandError

if TYPE_CHECKING:
    import argparse

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
    print(f"{'':{width}}{'torch':>20}{'ours':>20}  ours/torch")
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
    cells = "".join(f"{f'{_shown(middle)} ±{_shown(half)}':>20}" for middle, half in spreads)
    ratios = [b / a for a, b in zip(torchs, ours, strict=True)]
    return f"{cells}  {geometric_mean(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


def _shown(figure: float) -> str:
    return f"{figure:,.0f}" if figure >= 1000 else f"{figure:.4g}"
