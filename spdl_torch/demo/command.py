"""``python -m spdl_torch demo``: loaders take turns in ``training.py``, and a table compares them.
``photographs`` writes what they load."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, TypeVar

from ..command_options import CommandError, whole_number
from ..handlers import handlers_deferred
from ..machine.limits import whole_cores
from ..shown_text import counted, printable, wrapped

if TYPE_CHECKING:
    import argparse
    from multiprocessing.connection import Connection

    from .training import Measurement

    Heading = tuple[str, str]
    """The two lines at the head of a variant's column."""
    Results = Mapping[Heading, Sequence[Measurement]]
    """The rounds of each variant."""

_Answer = TypeVar("_Answer")


VARIANTS = {
    ("torch", "DataLoader"): ("torch.utils.data:DataLoader", "torchvision.datasets:ImageFolder"),
    ("spdl_torch", "DataLoader"): ("spdl_torch:DataLoader", "torchvision.datasets:ImageFolder"),
    ("spdl_torch", "+ImageFolder"): ("spdl_torch:DataLoader", "spdl_torch:ImageFolder"),
}
"""What the training script imports: the user's program today, then one import changed, then two.
The loader and the folder of images."""

_ROWS = (
    ("loading alone", "images/s", 1, "higher"),
    ("training light network", "images/s", 1, "higher"),
    ("  waiting for data", "% of time", 100, "lower"),
    ("time to first batch", "ms", 1e3, "lower"),
)
"""Name, unit, factor to it and which way is better, of each field of a measurement."""

_NUM_PHOTOGRAPHS, _NUM_PHOTOGRAPHS_SMOKE = 96, 32
_MOST_DEFAULT_WORKERS = 8
_REPORT_TIMES = 8
"""For the report so many times the usual amount, as it has to load for two seconds."""
_MATTERS = 0.05
"""The part of a speed below which a difference does not matter."""


def add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to those of ``spdl-torch``."""
    demo = commands.add_parser(
        "demo",
        help="load and train with torch's DataLoader and with ours, and compare",
        description="Load photographs, alone and for a light network, with torch's DataLoader "
        "and with ours, each in a process of its own. Ends with a table of speed and waiting, and "
        "with what holds ours back. On a GPU it also checks that batches arrive there whole. Takes "
        "about a minute on 2 quiet cores.",
    )
    add = demo.add_argument
    add("--data", type=Path, metavar="DIR", help="load these images, a folder per class")
    add("--smoke", action="store_true", help="a run of 10 to 20 seconds that shows it works")
    workers = min(whole_cores(), _MOST_DEFAULT_WORKERS)
    add("--workers", type=whole_number, metavar="N", default=workers, help="one per core, 8 max")
    add("--rounds", type=whole_number, metavar="N", default=5, help="turns of each loader (5)")
    demo.set_defaults(run_command=lambda options: Demo(options).run())


def add_photographs(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to those of ``spdl-torch``."""
    photographs = commands.add_parser(
        "photographs",
        help="write photograph-like JPEGs to try things out with",
        description="Write DIR/train and DIR/val, each with a folder for each class, as "
        "torchvision's ImageFolder reads them, and print the paths. Decoding one costs what "
        "decoding one of ImageNet's costs.",
    )
    add = photographs.add_argument
    add("folder", type=Path, metavar="DIR", help="made if it does not exist")
    count = "photographs in each of train and val (default: 8); a thousand take half a minute"
    add("--count", type=whole_number, metavar="N", default=8, help=count)
    add("--classes", type=whole_number, metavar="N", default=2, help="folders in each (2)")
    photographs.set_defaults(run_command=_photographs)


def _photographs(options: argparse.Namespace) -> int:
    from .photographs import write_photographs

    folders = [options.folder / split for split in ("train", "val")]
    for folder in folders:
        if folder.exists():
            raise CommandError(f"{folder} is there already. Remove it, or give another folder.")
    try:
        for seed, folder in enumerate(folders):
            write_photographs(folder, options.count, seed=seed, num_classes=options.classes)
    except OSError as error:
        raise CommandError(error) from error
    print(*folders, sep="\n")
    return 0


class _TurnFailed(Exception):
    """A process ended without an answer; it has printed why."""


class Demo:
    """One run of the command, with what has been measured so far."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._part = ""
        self._results: dict[Heading, list[Measurement]] = {}

    def run(self) -> int:
        """Compare the loaders, show the table and return the exit status.

        Ctrl-C ends the present turn, shows the table of what was measured so far, and returns 130.
        Raises: CommandError: ``--data`` is no folder of images.
        """
        how_long = "10 to 20 seconds." if self._options.smoke else "About a minute."
        print(how_long, "Ctrl-C ends it, with a table of what was measured.", file=sys.stderr)
        status = 0
        try:
            with tempfile.TemporaryDirectory(prefix="spdl-torch-demo-") as made:
                if self._options.data is None:
                    from .photographs import write_photographs

                    count = _NUM_PHOTOGRAPHS_SMOKE if self._options.smoke else _NUM_PHOTOGRAPHS
                    self._begin(f"writing {count} photographs")
                    write_photographs(Path(made), count)
                self._measure(self._options.data or Path(made))
        except KeyboardInterrupt:
            status = 130
            self._say("Interrupted.")
        except _TurnFailed as failure:
            status = 1
            print(f"spdl-torch demo: {self._part}: {failure}", file=sys.stderr)
        self._show()
        return status

    def _measure(self, folder: Path) -> None:
        """Run every variant in turn, round after round, the other way round in every second one: a
        disturbance then hits all of them, and none is always the first."""
        self._begin("importing torch")
        from .training import Job, check_folder, check_gpu, describe, measure, report_of

        options = self._options
        check_folder(folder)
        self._begin("reading the images once")
        self._say(_apart(describe, str(folder)))
        num_rounds = 1 if options.smoke else options.rounds
        rounds = counted(num_rounds, "round")
        self._say(f"{whole_cores()} cores, num_workers={options.workers}, {rounds}")
        turns = [
            variant
            for number in range(num_rounds)
            for variant in list(VARIANTS)[:: -1 if number % 2 else 1]
        ]
        for number, variant in enumerate(turns, 1):
            self._begin(f"{number}/{len(turns)}: {' '.join(variant)}")
            job = Job(VARIANTS[variant], str(folder), options.workers, options.smoke)
            measured = _apart(measure, job)  # Ctrl-C may end it: a column has a turn at least
            self._results.setdefault(variant, []).append(measured)
        if not options.smoke:
            self._begin("our loader's report")
            ours = job._replace(imports=[*VARIANTS.values()][-1], times=_REPORT_TIMES)
            self._say(f"\n{_apart(report_of, ours)}")
        self._begin("looking for a GPU")
        if lines := _apart(check_gpu, options.workers):
            self._say(f"\n{lines}")

    def _show(self) -> None:
        """Show what was measured, as far as it went."""
        if not self._results:
            return
        self._say("\nPhotographs, cropped at random and resized:")
        self._say(comparison_table(self._results, with_ratios=not self._options.smoke))
        if self._options.smoke:
            self._say("The smoke run is too short to compare. Next: leave out --smoke.")
        elif len(self._results) > 1:
            self._say(verdict(self._results))

    def _begin(self, part: str) -> None:
        self._part = part
        print(part, file=sys.stderr)

    def _say(self, text: str) -> None:
        print(printable(text), flush=True)


def _apart(work: Callable[..., _Answer], *arguments: object) -> _Answer:
    """Do ``work`` in a process of its own, or where a fork is not safe do it here.

    A fork has no intra-op threads, and no GPU, of its parent's: this process computes nothing. It
    leads a group of its own, with its workers, so that Ctrl-C meets this process alone.
    """
    if sys.platform != "linux":
        return work(*arguments)
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(writer, work, arguments))
    try:
        with handlers_deferred():  # what a handler raises in the middle of a fork is lost
            process.start()
        writer.close()
        answer: _Answer = reader.recv()
    except EOFError:
        process.join()
        raise _TurnFailed(f"the process ended with status {process.exitcode}") from None
    except BaseException:
        if process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()  # it may not have its group yet
        raise
    process.join()
    return answer


def _send(writer: Connection, work: Callable[..., object], arguments: Sequence[object]) -> None:
    os.setpgid(0, 0)
    writer.send(work(*arguments))


def comparison_table(results: Results, *, with_ratios: bool = True) -> str:
    """Return a column for each variant, the median of its rounds, and ``±`` half the difference
    between the best and the worst; then the ratio of each further column to the first.
    """
    over = ["2nd/1st", "3rd/1st"][: len(results) - 1] if with_ratios else []
    lines = []
    for number, ratios in ((0, [""] * len(over)), (1, over)):
        cells = "".join(f"{heading[number]:>14}" for heading in results)
        lines.append(f"{'':34}{cells}{''.join(f'{each:>8}' for each in ratios)}")
    lines[1] += " better" if over else ""
    lines.append("-" * len(lines[1]))
    for field, (name, unit, factor, better) in enumerate(_ROWS):
        rounds = [[factor * each[field] for each in turns] for turns in results.values()]
        line = f"{name:24}{unit:10}{''.join(f'{_cell(values):>14}' for values in rounds)}"
        if over:
            line += "".join(f"{median(each):>7.2f}x" for each in _ratios(results, field))
            line += f"{better:>7}"
        lines.append(line)
    return "\n".join(lines)


def _cell(values: Sequence[float]) -> str:
    """Return ``640 ±12``; the spread only when there is one."""
    digits = 0 if median(values) >= 100 else 1
    spread = f" ±{(max(values) - min(values)) / 2:.{digits}f}" if len(values) > 1 else ""
    return f"{median(values):.{digits}f}{spread}"


def _ratios(results: Results, field: int) -> list[list[float]]:
    """Return, for each variant but the first, its values over the first's. Those of one round were
    measured one after the other: what disturbs the machine disturbs both.
    """
    first, *others = results.values()
    pairs = (zip(first, each, strict=False) for each in others)
    return [[b[field] / a[field] if a[field] else 1.0 for a, b in each] for each in pairs]


def verdict(results: Results) -> str:
    """Return what the last column gains in training: it has the most of ours."""
    ratios = _ratios(results, 1)[-1]
    if median(ratios) >= 1 + _MATTERS and min(ratios) > 1:
        found = "faster"
    elif median(ratios) <= 1 - _MATTERS and max(ratios) < 1:
        found = "slower: keep torch's for this dataset"
    else:
        found = "about level; --rounds 20 tells smaller differences"
    return wrapped(
        f"The light network trains at {median(ratios):.2f}x torch's images/s in the last column "
        f"({min(ratios):.2f} to {max(ratios):.2f} over the rounds): {found}."
    )
