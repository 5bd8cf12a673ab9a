"""The work of ``python -m spdl_torch demo``, from the arguments to the tables."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from ..command_options import CommandError
from ..machine.limits import whole_cores
from ..measuring.child_process import ChildFailure, answers_of
from ..progress_bar import ProgressBar, duration, time_left
from ..scopes import scope
from ..shown_text import counted, wrapped
from .jobs import (
    PHOTOGRAPHS,
    VARIANTS,
    WORKLOADS,
    Comparison,
    Environment,
    Measurement,
    Prepare,
    decode_answer,
    encode,
    expected_seconds,
)
from .outcome import Outcome
from .text import ending_text, workload_text

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

    from .jobs import Measure, WorkloadPlan

    _Answer = tuple[Environment | Measurement, float | None]

_NUM_PHOTOGRAPHS = 96
_NUM_PHOTOGRAPHS_SMOKE = 32
_MOST_DEFAULT_WORKERS = 8

_HOW_LONG = {
    True: "A short run, 10 to 20 seconds.",
    False: "70 to 90 seconds on quiet cores; a closer estimate follows when the images are there. "
    "Ctrl-C ends it early, with tables of what was measured.",
}

# Those of torchvision.datasets.folder.IMG_EXTENSIONS; importing them would import torch.
_IMAGE_SUFFIXES = frozenset(
    (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
)


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoOptions:
    """The command line."""

    data: Path | None
    """A tree of images with one folder per class; None writes one."""
    epochs: int | None
    """Whole passes over the images; None trains for a fixed number of images."""
    smoke: bool
    num_workers: int
    num_rounds: int


def default_workers() -> int:
    """Return the number of cores that this process may use, 8 at most."""
    return min(whole_cores(), _MOST_DEFAULT_WORKERS)


def run_demo(options: DemoOptions, out: TextIO, progress: TextIO) -> int:
    """Compare the loaders; write the tables to ``out``; return the exit status.

    Ctrl-C kills the current run, writes the tables of what was measured so far, and returns 130.
    Raises: CommandError: ``options.data`` is not a class-per-folder tree of images.
    """
    if options.data is not None:
        check_folder(options.data)
    demo = _Demo(options, out, progress)
    print(wrapped(_HOW_LONG[options.smoke]), file=progress, flush=True)
    try:
        with _image_folder(options.data) as folder:
            demo.run(folder)
        status = 0
    except KeyboardInterrupt:
        demo.meter.end()
        print("Interrupted.", file=out)
        status = 130
    except ChildFailure as failure:
        demo.meter.end()
        print(f"spdl-torch demo: {demo.activity}: {failure}", file=sys.stderr)
        status = 1
    demo.finish()
    return status


def check_folder(folder: Path) -> None:
    """Refuse what is not a class-per-folder tree of images.

    Raises: CommandError.
    """
    expected = "--data must be a folder with one folder of images per class (class/photo.jpg)"
    remedy = "Give the folder above the classes, or leave --data out to use generated photographs."
    if not folder.is_dir():
        given = f"{folder} is a file" if folder.exists() else f"{folder} does not exist"
        raise CommandError(f"{expected}; {given}. {remedy}")
    classes = sorted(entry for entry in folder.iterdir() if entry.is_dir())
    if not classes:
        raise CommandError(f"{expected}; {folder} holds no folders. {remedy}")
    empty = [entry.name for entry in classes if not _holds_image(entry)]
    if len(empty) == len(classes):
        raise CommandError(f"{expected}; the folders in {folder} hold no images. {remedy}")
    if empty:
        raise CommandError(
            f"{expected}; {len(empty)} of {len(classes)} folders in {folder} hold no images, "
            f"{empty[0]!r} first. Remove them, or give another folder."
        )


def _holds_image(folder: Path) -> bool:
    return any(
        os.path.splitext(name)[1].lower() in _IMAGE_SUFFIXES
        for _, _, names in os.walk(folder)
        for name in names
    )


@scope
def _image_folder(given: Path | None) -> Iterator[Path]:
    if given is not None:
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="spdl-torch-demo-") as made:
        yield Path(made)


class _Demo:
    """One run of the command, with what has been measured so far and how to show it."""

    def __init__(self, options: DemoOptions, out: TextIO, progress: TextIO) -> None:
        self._options = options
        self._out = out
        self.meter = ProgressBar(progress)
        self.activity = "starting"
        self._outcome = Outcome(
            num_workers=options.num_workers, num_cores=whole_cores(), is_smoke=options.smoke
        )

    def run(self, folder: Path) -> None:
        """Prepare the images, then run every variant in turn, round after round."""
        count = _NUM_PHOTOGRAPHS_SMOKE if self._options.smoke else _NUM_PHOTOGRAPHS
        prepare = Prepare(
            folder=str(folder),
            num_photographs=count if self._options.data is None else 0,
            # Users who bring images want to see those measured.
            workloads=tuple(WORKLOADS) if self._options.data is None else (PHOTOGRAPHS,),
            is_smoke=self._options.smoke,
        )
        job = Comparison(
            prepare=prepare,
            num_workers=self._options.num_workers,
            num_rounds=self._options.num_rounds,
            epochs=self._options.epochs,
        )
        self._begin("preparing", "importing torch")
        with closing(run_job(job, self._on_line)) as answers:
            environment, _ = next(answers)
            assert isinstance(environment, Environment), f"{environment=}"
            turns = job.measures(environment)
            self._know(environment, {each.workload: each.plan for each in turns})
            self._follow(turns, environment, answers)

    def _follow(
        self, turns: Sequence[Measure], environment: Environment, answers: Iterator[_Answer]
    ) -> None:
        parts = [
            expected_seconds(turn.workload, turn.plan, environment, self._options.num_workers)
            for turn in turns
        ]
        if not self._options.smoke:
            total = duration(sum(parts))
            self._say(f"This takes about {total} if nothing else keeps the cores busy.")
        start = time.monotonic()
        for number, turn in enumerate(turns):
            seconds = time.monotonic() - start
            left = time_left(sum(parts[:number]), sum(parts), seconds, sum(parts))
            self._begin(f"{number + 1}/{len(turns)}{left}: {_name(turn)}", "starting")
            self._keep(turn, *next(answers))

    def _know(self, environment: Environment, plans: Mapping[str, WorkloadPlan]) -> None:
        self.meter.end()
        self._outcome.environment = environment
        self._outcome.plans.update(plans)
        self._say(self._setting(environment))

    def _keep(self, job: Measure, answer: Environment | Measurement, peak: float | None) -> None:
        assert isinstance(answer, Measurement), f"{answer=}"
        self.meter.end()
        self._outcome.add(job, replace(answer, peak_bytes=peak))

    def _begin(self, activity: str, part: str) -> None:
        self.activity = activity
        self.meter.begin(f"{activity}: {part}")

    def _on_line(self, line: dict[str, Any]) -> None:
        if "phase" in line:
            self.meter.begin(f"{self.activity}: {line['phase']}", line["total"])
        else:
            self.meter.advance(line["done"])

    def _say(self, text: str) -> None:
        print(text, file=self._out, flush=True)

    def _setting(self, environment: Environment) -> str:
        options = self._options
        where = options.data or "generated photographs"
        rounds = counted(options.num_rounds, "round")
        text = (
            f"{environment.num_images} images ({environment.mean_bytes / 1000:.0f} kB each, "
            f"{environment.num_classes} classes) of {where}\n"
            f"python {environment.python}, torch {environment.torch}, "
            f"torchvision {environment.torchvision}, {environment.device_name}\n"
            f"{whole_cores()} cores, num_workers={options.num_workers}, "
            f"ImageFolder's crops by {environment.codec}\n"
            f"A turn loads alone, then trains a light network, then resnet18: {rounds}."
        )
        return "\n".join(map(wrapped, text.splitlines()))

    def finish(self) -> None:
        """Write what was measured, as far as it went."""
        outcome = self._outcome
        for workload in outcome.measured():
            self._say(f"\n{workload_text(outcome, workload)}")
        if outcome.measured():
            self._say(f"\n{ending_text(outcome)}")


def _name(job: Measure) -> str:
    return f"{job.workload}, {VARIANTS[job.variant].name}"


def run_job(
    job: Comparison, on_line: Callable[[dict[str, Any]], None]
) -> Generator[tuple[Environment | Measurement, float | None]]:
    """Do ``job`` in a fresh process; yield its answers as they come, each with the peak bytes of
    the process tree since the one before.

    Otherwise as :func:`~spdl_torch.measuring.child_process.answers_of`.
    """
    argument = json.dumps(encode(job))
    with contextlib.closing(answers_of(f"{__package__}.child", argument, on_line)) as answers:
        for answer, peak in answers:
            yield decode_answer(answer), peak
