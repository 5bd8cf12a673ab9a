"""How many images a second reach the devices of this machine: one process per GPU.

Every worker process takes its share of a list of image files (line ``n`` of the list belongs to
worker ``n % number of workers``) and runs one pipeline: paths -> batches of paths ->
``spdl_torch.io.load_image_batch``, which reads, decodes, resizes and, for a GPU, copies the batch
to the device, ``--num-threads`` batches at once -> the worker's main thread, which drops them.
Without a GPU the batches stay in memory, and ``--num-workers`` says how many processes there are.

It prints, every few seconds, the frames (images) so far, and in the end for every worker and for
all of them ``FPS``, frames per second, and ``BPS``, batches per second:

- of the *whole run*: everything that arrived, over the seconds from the common start to the last
  batch of the slowest worker. At the start every process is up, torch is imported, the first
  call's compilation is done, and no pipeline is running yet;
- *steady*: what arrived after the first batch of all, over the seconds from then to the last one.

Neither is a mean of the workers' rates or times. A batch counts when its data is on the device.

SIGTERM and Ctrl-C stop the workers, who finish the batches in hand, and print the numbers so far;
a second one does not wait. A file that is missing or cannot be decoded ends the program with its
name; with ``--on-error skip`` it is left out, counted and named.

With ``--trace out.json`` each worker records what its threads do for the first ``--trace-batches``
batches and writes ``out-0.json``, ``out-1.json``, ... for https://ui.perfetto.dev.

Exit code: 0 all was loaded; 1 a file or a worker failed; 2 wrong options; 130 and 143 stopped by
Ctrl-C and by SIGTERM, so that the figures are of a part.

    python examples/image_dataloading.py --data DIR [--num-workers N] [--num-threads N]
    python examples/image_dataloading.py --input-flist FILE [--prefix DIR] [--max-batches N]
    python examples/image_dataloading.py --smoke
"""

from __future__ import annotations

import argparse
import contextlib
import io
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from spdl_torch.autotune import Limits
from spdl_torch.data.sources import ListSource
from spdl_torch.demo.photographs import write_photographs
from spdl_torch.io import cuda_config, decode_image, load_image_batch
from spdl_torch.observe import tracing
from spdl_torch.pipeline import PipelineBuilder

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"})
SECONDS_BETWEEN_REPORTS = 0.25
GRACE_SECONDS = 10.0
"""The time in which workers may finish the batches in hand."""
NAMES_KEPT = 5
"""Names of skipped files that are printed; their count is always exact."""
STOPS = (signal.SIGINT, signal.SIGTERM)


@dataclass(kw_only=True, slots=True)
class Tally:
    """The amount that a worker has loaded. Times are on the monotonic clock, in seconds."""

    frames: int = 0
    batches: int = 0
    started: float = 0.0
    first: float = 0.0
    """The time of the first batch; 0 before it arrives."""
    last: float = 0.0
    first_frames: int = 0
    num_skipped: int = 0
    skipped: list[str] = field(default_factory=list)
    """The errors of the first few."""


# -- in a worker process ---------------------------------------------------------------------------


def work(options: argparse.Namespace, flist: str, number: int, wire: Connection) -> None:
    """Warm up, wait for the start, load, and report to the parent: tallies, or an error's text.

    SIGINT and SIGTERM are blocked here from the start: Ctrl-C goes to the whole process group, and
    it is the parent that says when to stop. Anything that it says is to stop; so is its end.
    """
    tally = Tally()
    with contextlib.suppress(EOFError, BrokenPipeError):  # the parent has died: nobody listens
        try:
            torch.set_num_threads(1)  # the pipeline's threads do the work
            load_batch = batch_loader(options, number)
            load_batch([a_small_image()])
            wire.send(tally)
            if wire.recv() == "go":
                consume(options, flist, number, load_batch, tally, wire)
            wire.send((tally, None))
        except (EOFError, BrokenPipeError):
            raise
        except Exception as error:
            wire.send((tally, reasons(error)))


def reasons(error: BaseException) -> str:
    """Return the errors inside a failed pipeline, a line each, with the notes that say where."""
    if isinstance(error, BaseExceptionGroup):
        return "\n".join(dict.fromkeys(reasons(member) for member in error.exceptions))
    notes = [f"({note})" for note in getattr(error, "__notes__", [])]
    return " ".join([f"{type(error).__name__}: {error}", *notes])


def batch_loader(
    options: argparse.Namespace, number: int
) -> Callable[[list[Any]], tuple[Tensor | None, list[str]]]:
    """Return the stage that does the work: from paths to a batch on the device, with the errors of
    the files that were left out."""
    size: dict[str, Any] = {"width": options.width, "height": options.height}
    if options.num_gpus:
        torch.cuda.set_device(number % options.num_gpus)
        size["device_config"] = cuda_config(number % options.num_gpus)

    def load_batch(paths: list[Any]) -> tuple[Tensor | None, list[str]]:
        try:
            return load_image_batch(paths, **size), []
        except (OSError, ValueError):
            if options.on_error == "raise":
                raise
        good, bad = [], []
        for path in paths:  # slow, but rare
            try:
                decode_image(path)
                good.append(path)
            except (OSError, ValueError) as error:
                bad.append(str(error))
        return (load_image_batch(good, **size) if good else None), bad

    return load_batch


def a_small_image() -> bytes:
    """Return a JPEG to load before the clock starts: imports, compilation, the device's context."""
    jpeg = io.BytesIO()
    Image.new("RGB", (16, 16)).save(jpeg, "JPEG")
    return jpeg.getvalue()


def consume(
    options: argparse.Namespace,
    flist: str,
    number: int,
    load_batch: Callable[[list[Any]], tuple[Tensor | None, list[str]]],
    tally: Tally,
    wire: Connection,
) -> None:
    """Run the pipeline to its end or until the parent says stop."""
    lines = Path(flist).read_text().split("\n")[number :: options.num_workers]
    front = f"{options.prefix.rstrip('/')}/" if options.prefix else ""
    paths: Any = ListSource([front + line.strip() for line in lines if line.strip()])
    limits = [] if options.worker_max_batches is None else [options.worker_max_batches]
    if options.max_batches is not None:  # --max-batches 5, 2 workers -> 3, 2
        each, rest = divmod(options.max_batches, options.num_workers)
        limits.append(each + (number < rest))
    if limits:
        paths = paths[: min(limits) * options.batch_size]
    builder = PipelineBuilder().add_source(paths).aggregate(options.batch_size)
    builder.pipe(load_batch, concurrency=options.num_threads, name="load_image_batch")
    pipeline = builder.add_sink(options.queue_size).build(max_failures=0)
    trace = contextlib.ExitStack()
    if options.trace is not None:  # a.json and a.json.gz: the number goes before the endings
        name = Path(options.trace).name
        stem = name.removesuffix(".gz").removesuffix(".json")
        own = Path(options.trace).with_name(name.replace(stem, f"{stem}-{number}", 1))
        trace.enter_context(tracing(own))
    tally.started = reported = time.monotonic()
    with trace, pipeline.auto_stop():
        while not wire.poll():
            try:
                batch, bad = pipeline.get_item(timeout=0.5)
            except TimeoutError:
                continue
            except EOFError:
                break
            tally.num_skipped += len(bad)
            tally.skipped = [*tally.skipped, *bad][:NAMES_KEPT]
            if batch is None:
                continue
            if not tally.batches:
                tally.first, tally.first_frames = now(options), len(batch)
            tally.frames += len(batch)
            tally.batches += 1
            tally.last = time.monotonic()
            if tally.batches == options.trace_batches:
                trace.close()
            if time.monotonic() - reported > SECONDS_BETWEEN_REPORTS:
                reported = time.monotonic()
                wire.send(tally)
    if tally.batches:
        tally.last = now(options)


def now(options: argparse.Namespace) -> float:
    """Return the time once everything that was begun on the device is done."""
    if options.num_gpus:
        torch.cuda.synchronize()
    return time.monotonic()


# -- in the parent ---------------------------------------------------------------------------------


@dataclass(kw_only=True, slots=True)
class Worker:
    """The parent's view of a worker process; a pipe joins them, so that each notices the other's
    end. Nothing is shared that a killed process could leave locked."""

    name: str
    process: BaseProcess
    wire: Connection
    tally: Tally | None = None
    """The newest one; None before the worker is ready."""
    is_done: bool = False
    failure: str | None = None

    def read(self) -> None:
        """Read a message, or notice that there will be none."""
        try:
            message = self.wire.recv()
        except (EOFError, OSError):
            self.process.join()
            code = self.process.exitcode or 0
            self.is_done, self.failure = True, f"the process ended with exit code {code}."
            if code < 0:
                self.failure = f"the process was killed by {signal.Signals(-code).name}."
            return
        if isinstance(message, Tally):
            self.tally = message
        else:
            (self.tally, self.failure), self.is_done = message, True

    def say(self, word: str) -> None:
        """Send ``go`` or ``stop``, unless the worker has ended."""
        with contextlib.suppress(OSError):
            self.wire.send(word)


class Stop:
    """Asks the workers to stop, at the first signal, failure or death; they have 10 s to finish the
    batches in hand, none after a second signal."""

    def __init__(self, workers: list[Worker]) -> None:
        self.workers = workers
        self.must_end_by = float("inf")
        self.signal: int | None = None
        for number in STOPS:
            signal.signal(number, self.on_signal)

    def __call__(self, grace_seconds: float = GRACE_SECONDS) -> None:
        """Ask for it."""
        self.must_end_by = min(self.must_end_by, time.monotonic() + grace_seconds)
        for worker in self.workers:
            worker.say("stop")

    def on_signal(self, number: int, _frame: object) -> None:
        """Remember the first one."""
        self(GRACE_SECONDS if self.signal is None else 0.0)
        self.signal = self.signal or number


def start_workers(options: argparse.Namespace, flist: str, workers: list[Worker]) -> None:
    """Start the processes, in which the signals that stop are blocked."""
    context = multiprocessing.get_context("spawn")
    resource_tracker.ensure_running()  # its start would undo the blocking below (Python 3.11)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        for number in range(options.num_workers):
            ours, theirs = context.Pipe()
            arguments = (options, flist, number, theirs)
            process = context.Process(target=work, args=arguments, daemon=True)
            process.start()
            theirs.close()  # so that the end of the worker is the end of the pipe
            device = f"cuda:{number % options.num_gpus}" if options.num_gpus else "cpu"
            name = f"worker {number} ({device})"
            workers.append(Worker(name=name, process=process, wire=ours))
            print(f"{name}: process {process.pid}, {options.num_threads} threads", flush=True)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def load_all(options: argparse.Namespace, flist: str) -> int:
    """Run the workers and print the numbers; return the exit code."""
    began = time.monotonic()
    workers: list[Worker] = []
    stop = Stop(workers)

    def listen(timeout: float) -> None:
        talking = {worker.wire: worker for worker in workers if not worker.is_done}
        for wire in connection.wait(list(talking), timeout):
            talking[wire].read()
            if talking[wire].failure is not None:
                stop()

    try:
        start_workers(options, flist, workers)
        while not all(worker.tally or worker.is_done for worker in workers):
            listen(0.5)
        for worker in workers:
            worker.say("go" if stop.must_end_by == float("inf") else "stop")
        due = time.monotonic() + options.interval
        while not all(worker.is_done for worker in workers) and time.monotonic() < stop.must_end_by:
            listen(min(max(due - time.monotonic(), 0.0), 0.5))
            if time.monotonic() >= due:
                print(f"so far: {line(loaded(workers))}", flush=True)
                due += options.interval
    finally:
        for worker in workers:
            if not worker.is_done:
                worker.process.kill()
            worker.process.join()
    print_summary(workers)
    if tallies := loaded(workers):
        print(f"start-up, not in the figures: {tallies[0].started - began:.1f} s")
    if stop.signal is not None:
        name = signal.Signals(stop.signal).name
        print(f"stopped by {name}: these are the figures of a part.")
    sys.stdout.flush()
    if failures := [f"{each.name}: {each.failure}" for each in workers if each.failure is not None]:
        print("\n".join(failures), file=sys.stderr)
        return 1
    return 0 if stop.signal is None else 128 + stop.signal


def loaded(workers: Sequence[Worker]) -> list[Tally]:
    """Return the tallies of the workers that have loaded anything."""
    return [worker.tally for worker in workers if worker.tally and worker.tally.batches]


def rate(frames: int, batches: int, seconds: float) -> str:
    """Return what arrived in a span of time, as text."""
    if not batches or seconds <= 0:
        return "too little to measure"
    return f"{frames / seconds:,.1f} FPS, {batches / seconds:,.2f} BPS"


def line(tallies: Sequence[Tally]) -> str:
    """Return the amount and the rate of everything, from the first start to the last batch."""
    frames, batches = sum(t.frames for t in tallies), sum(t.batches for t in tallies)
    seconds = 0.0
    if tallies:
        seconds = max(t.last for t in tallies) - min(t.started for t in tallies)
    amount = f"{frames:,} frames, {batches:,} batches in {seconds:.2f} s"
    return f"{amount}: {rate(frames, batches, seconds)}"


def print_summary(workers: Sequence[Worker]) -> None:
    """Print the numbers of each worker and of all of them."""
    tallies = loaded(workers)
    for worker in workers:
        cut_short = "" if worker.is_done else " (ended before it was done)"
        print(f"{worker.name}: {line(loaded([worker]))}{cut_short}")
    print(f"all, whole run: {line(tallies)}")
    steady = "too little to measure"
    if tallies:  # what came after the first batch of all
        earliest = min(tallies, key=lambda tally: tally.first)
        frames = sum(tally.frames for tally in tallies) - earliest.first_frames
        batches = sum(tally.batches for tally in tallies) - 1
        steady = rate(frames, batches, max(tally.last for tally in tallies) - earliest.first)
    print(f"all, steady: {steady}")
    reports = [worker.tally for worker in workers if worker.tally]
    if num_skipped := sum(report.num_skipped for report in reports):
        print(f"skipped: {num_skipped:,} files, among them")
        reasons = [reason for report in reports for reason in report.skipped]
        print(*(f"  {reason}" for reason in reasons[:NAMES_KEPT]), sep="\n")


@contextlib.contextmanager
def file_list(options: argparse.Namespace) -> Iterator[str]:
    """Yield the list that was given, or one written for ``--data`` and for ``--smoke``."""
    if options.input_flist is not None:
        if "://" not in options.input_flist and not os.path.isfile(options.input_flist):
            sys.exit(f"--input-flist {options.input_flist}: there is no such file.")
        yield options.input_flist
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(options.data or temporary)
        if options.data is None:
            write_photographs(folder, 12)
        paths = images_below(folder)
        if not paths:
            sys.exit(f"--data {folder}: no images there, by their names ({' '.join(SUFFIXES)}).")
        flist = Path(temporary, "images.txt")
        flist.write_text("".join(f"{path}\n" for path in paths), encoding="utf-8")
        yield str(flist)


def images_below(folder: Path) -> list[str]:
    """Return the paths of all images in a folder and its subfolders, sorted."""
    walk = os.walk(folder, followlinks=True)
    paths = [os.path.join(place, name) for place, _, names in walk for name in names]
    return sorted(path for path in paths if os.path.splitext(path)[1].lower() in SUFFIXES)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options; ``--smoke`` fills in small ones."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    data = parser.add_mutually_exclusive_group(required=True)
    data.add_argument("--input-flist", metavar="FILE", help="a text file, a path or URL a line")
    data.add_argument("--data", metavar="DIR", help="all images below a folder")
    data.add_argument("--smoke", action="store_true", help="a few made-up photographs")
    add("--prefix", default="", metavar="DIR", help="folder or URL that the list's paths are in")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--num-workers", type=positive, help="processes; one per GPU, or one on the CPU")
    add("--num-threads", type=positive, help="per worker; its share of the cores, at most 16")
    add("--batch-size", type=positive, default=32)
    add("--max-batches", type=positive, help="of all workers together")
    add("--worker-max-batches", type=positive, help="of each worker")
    add("--queue-size", type=positive, default=16, help="finished batches that may wait")
    add("--width", type=positive, default=224)
    add("--height", type=positive, default=224)
    add("--on-error", choices=("raise", "skip"), default="raise", help="what a bad file does")
    add("--interval", type=float, default=3.0, metavar="S", help="seconds between two reports")
    add("--trace", metavar="FILE.json", help="write a trace of each worker")
    add("--trace-batches", type=positive, default=50, help="how many batches are in the trace")
    options = parser.parse_args(arguments)
    if options.smoke:
        options.batch_size, options.num_workers = 4, options.num_workers or 2
        options.device = "cpu"
    options.num_gpus = 0 if options.device == "cpu" else torch.cuda.device_count()
    if options.device == "cuda" and not options.num_gpus:
        parser.error("--device cuda: torch finds no GPU. Use --device cpu.")
    options.num_workers = options.num_workers or options.num_gpus or 1
    share_of_cores = int(Limits.of_this_machine().num_cores) // options.num_workers
    options.num_threads = options.num_threads or max(min(share_of_cores, 16), 1)
    return options


def positive(text: str) -> int:
    """Return an option's whole number of at least 1, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be >= 1, got {value}")
    return value


def main(arguments: list[str] | None = None) -> int:
    """Run the program; return the exit code."""
    options = parse(arguments)
    with file_list(options) as flist:
        return load_all(options, flist)


if __name__ == "__main__":
    sys.exit(main())
