"""The work of ``python -m spdl_torch demo``, from the arguments to the tables."""

from __future__ import annotations

import os
import sys
import tempfile
import textwrap
import time
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from ..measuring.child_process import ChildFailure
from ..measuring.machine import usable_cores
from ..measuring.progress_bar import ProgressBar, counted, duration, time_left
from .children import run_job
from .jobs import (
    VARIANTS,
    Environment,
    Measure,
    Measurement,
    Prepare,
    Smoke,
    expected_seconds,
    make_plan,
)
from .table import comparison_table, stage_table
from .verdict import bottleneck, compare, quiet_rounds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .jobs import Plan

__all__ = ["DemoOptions", "UsageError", "check_folder", "default_workers", "run_demo"]

_NUM_PHOTOGRAPHS = 240
_NUM_PHOTOGRAPHS_SMOKE = 32
_MOST_DEFAULT_WORKERS = 8
_COLUMNS = 99

_HOW_LONG = {
    True: "A short run, 10 to 20 seconds.",
    False: "A few minutes; how many is said when the images are there. Ctrl-C ends it early, with "
    "a table of what was measured.",
}

# Those of torchvision.datasets.folder.IMG_EXTENSIONS; importing them would import torch.
_IMAGE_SUFFIXES = frozenset(
    (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
)


class UsageError(ValueError):
    """The caller's fault: an argument that cannot be used; the message says what to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoOptions:
    """The command line."""

    data: Path | None
    """A class-per-folder tree of images; None writes one."""
    epochs: int | None
    """Whole passes over the images; None trains for a fixed number of images."""
    smoke: bool
    num_workers: int
    num_rounds: int


def default_workers() -> int:
    """The cores that this process may use, 8 at most."""
    return min(usable_cores(), _MOST_DEFAULT_WORKERS)


def run_demo(options: DemoOptions, out: TextIO, progress: TextIO) -> int:
    """Compare the loaders; write the tables to ``out``; return the exit status.

    Ctrl-C kills what runs, writes the tables of what was measured so far, and returns 130.
    Raises: UsageError: ``options.data`` is not a class-per-folder tree of images.
    """
    if options.data is not None:
        check_folder(options.data)
    demo = _Demo(options, out, progress)
    print(_HOW_LONG[options.smoke], file=progress, flush=True)
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
    demo.write_tables()
    return status


def check_folder(folder: Path) -> None:
    """Refuse what is not a class-per-folder tree of images.

    Raises: UsageError.
    """
    expected = "--data must be a folder with one folder of images per class (class/photo.jpg)"
    remedy = "Give the folder above the classes, or leave --data out to use generated photographs."
    if not folder.is_dir():
        given = f"{folder} is a file" if folder.exists() else f"{folder} does not exist"
        raise UsageError(f"{expected}; {given}. {remedy}")
    classes = sorted(entry for entry in folder.iterdir() if entry.is_dir())
    if not classes:
        raise UsageError(f"{expected}; {folder} holds no folders. {remedy}")
    empty = [entry.name for entry in classes if not _holds_image(entry)]
    if len(empty) == len(classes):
        raise UsageError(f"{expected}; the folders in {folder} hold no images. {remedy}")
    if empty:
        raise UsageError(
            f"{expected}; {len(empty)} of {len(classes)} folders in {folder} hold no images, "
            f"{empty[0]!r} first. Remove them, or give another folder."
        )


def _holds_image(folder: Path) -> bool:
    return any(
        os.path.splitext(name)[1].lower() in _IMAGE_SUFFIXES
        for _, _, names in os.walk(folder)
        for name in names
    )


@contextmanager
def _image_folder(given: Path | None) -> Iterator[Path]:
    if given is not None:
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="spdl-torch-demo-") as made:
        yield Path(made)


class _Demo:
    """One run of the command: what has been measured so far, and how to show it."""

    def __init__(self, options: DemoOptions, out: TextIO, progress: TextIO) -> None:
        self._options = options
        self._out = out
        self.meter = ProgressBar(progress)
        self.activity = "starting"
        self._results: dict[str, list[Measurement]] = {key: [] for key in VARIANTS}

    def run(self, folder: Path) -> None:
        """Prepare the images, then run every variant in turn, round after round."""
        count = _NUM_PHOTOGRAPHS_SMOKE if self._options.smoke else _NUM_PHOTOGRAPHS
        num_photographs = count if self._options.data is None else 0
        # Several intra-op threads spin while they wait for each other, which beside other programs
        # makes a short run a long one.
        num_threads = 1 if self._options.smoke else None
        prepare = Prepare(
            folder=str(folder), num_photographs=num_photographs, num_threads=num_threads
        )
        self._begin("preparing", "starting")
        if self._options.smoke:
            self._run_in_one_process(prepare)
        else:
            self._run_apart(prepare)

    def _run_in_one_process(self, prepare: Prepare) -> None:
        options = self._options
        job = Smoke(prepare=prepare, num_workers=options.num_workers, epochs=options.epochs)
        with closing(run_job(job, self._on_line)) as answers:
            environment, _ = next(answers)
            assert isinstance(environment, Environment), f"{environment=}"
            self.meter.end()
            measures = job.measures(environment)
            self._write_setting(environment, measures[0].plan)
            for number, measure in enumerate(measures, 1):
                heading = " ".join(VARIANTS[measure.variant].heading)
                self._begin(f"{number}/{len(measures)} {heading}", "starting")
                self._keep(measure.variant, *next(answers))

    def _run_apart(self, prepare: Prepare) -> None:
        options = self._options
        environment, _ = self._answer(prepare)
        assert isinstance(environment, Environment), f"{environment=}"
        plan = make_plan(environment.device, environment.num_images, epochs=options.epochs)
        # Round after round, not variant after variant: a disturbance then hits all of them.
        turns = [key for _ in range(options.num_rounds) for key in VARIANTS]
        expected = len(turns) * expected_seconds(plan, environment.device, usable_cores())
        self._write_setting(environment, plan)
        self._say(f"This takes about {duration(expected)} if nothing else keeps the machine busy.")
        start = time.monotonic()
        for number, key in enumerate(turns, 1):
            left = time_left(number - 1, len(turns), time.monotonic() - start, expected)
            heading = " ".join(VARIANTS[key].heading)
            self._begin(f"{number}/{len(turns)}{left}: {heading}", "importing torch")
            job = Measure(
                variant=key,
                folder=prepare.folder,
                num_workers=options.num_workers,
                device=environment.device,
                plan=plan,
            )
            self._keep(key, *self._answer(job))

    def _answer(self, job: Prepare | Measure) -> tuple[Environment | Measurement, float | None]:
        with closing(run_job(job, self._on_line)) as answers:
            answer = next(answers)
        self.meter.end()
        return answer

    def _keep(self, variant: str, answer: Environment | Measurement, peak: float | None) -> None:
        assert isinstance(answer, Measurement), f"{answer=}"
        self.meter.end()
        self._results[variant].append(replace(answer, peak_bytes=peak))

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

    def _write_setting(self, environment: Environment, plan: Plan) -> None:
        where = self._options.data or "generated photographs"
        apart = "" if self._options.smoke else ", in a process of its own"
        print(
            f"{environment.num_images} images ({environment.mean_bytes / 1000:.0f} kB each, "
            f"{environment.num_classes} classes) of {where}\n"
            f"python {environment.python}, torch {environment.torch}, "
            f"torchvision {environment.torchvision}, {environment.device_name}\n"
            f"{usable_cores()} cores, num_workers={self._options.num_workers}, "
            f"{counted(environment.num_threads, 'intra-op thread')} for the model, "
            f"ImageFolder's crops by {environment.codec}\n"
            f"each run{apart}: load {plan.loading_images} images, then train "
            f"resnet18 on {plan.epoch_images * plan.epochs}\n"
            f"({counted(plan.epochs, 'epoch')}, batches of {plan.batch_size}, RandomResizedCrop to "
            f"{plan.crop_pixels} pixels, flip, SGD); {counted(self._options.num_rounds, 'round')}",
            file=self._out,
            flush=True,
        )

    def write_tables(self) -> None:
        """Write what was measured, as far as it went."""
        everything = {key: results for key, results in self._results.items() if results}
        if not everything:
            return
        out = self._out
        measured = quiet_rounds(everything, usable_cores())
        left_out = sum(map(len, everything.values())) - sum(map(len, measured.values()))
        if left_out:
            runs = counted(left_out, "run")
            print(f"\n{runs} left out: other programs were busy meanwhile", file=out)
        if self._options.smoke:  # nor would ratios and a bottleneck mean anything
            print(f"\n{comparison_table(measured, with_ratio=False)}", file=out)
            print("\nThe smoke run is too short to compare. Next: leave out --smoke.", file=out)
            return
        print(f"\n{comparison_table(measured)}", file=out)
        last = measured[list(measured)[-1]]
        if last[-1].stages:
            print(f"\nOur loader's stages while training\n{stage_table(last[-1].stages)}", file=out)
            _, verdict = bottleneck(last[-1].stages, last[-1].wait_ratio)
            print(_wrapped("", f"{verdict.finding} {verdict.advice}"), file=out)
        if len(measured) < len(VARIANTS):
            return
        verdict = compare(next(iter(measured.values())), last, usable_cores())
        print(f"\n{_wrapped('Verdict: ', verdict.finding)}", file=out)
        print(_wrapped("Next:    ", verdict.advice), file=out)


def _wrapped(label: str, text: str) -> str:
    return textwrap.fill(text, _COLUMNS, initial_indent=label, subsequent_indent=" " * len(label))
