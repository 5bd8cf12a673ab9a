"""How many images a second reach the devices of this machine: one process per GPU.

Every worker process takes its share of a list of image files (number ``n`` belongs to worker
``n % number of workers``) and runs one pipeline: paths -> batches of paths ->
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
name; with ``--on-error skip`` those that cannot be decoded are left out and counted.

With ``--trace out.json`` each worker records what its threads do and writes ``0-out.json``,
``1-out.json``, ... for https://ui.perfetto.dev; ``--max-batches`` keeps them small.

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
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection
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
from spdl_torch.io import cuda_config, load_image_batch
from spdl_torch.observe import tracing
from spdl_torch.pipeline import PipelineBuilder

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"})
SECONDS_BETWEEN_REPORTS = 0.25
STOPS = (signal.SIGINT, signal.SIGTERM)


@dataclass(kw_only=True, slots=True)
class Tally:
    """The amount that a worker has loaded. Times are on the monotonic clock, in seconds."""

    frames: int = 0
    batches: int = 0
    skipped: int = 0
    started: float = 0.0
    first: float = 0.0
    """The time of the first batch; 0 before it arrives."""
    first_frames: int = 0
    last: float = 0.0


# -- in a worker process ---------------------------------------------------------------------------


def work(options: argparse.Namespace, number: int, wire: Connection) -> None:
    """Warm up, wait for the paths, load them, and report to the parent: tallies, then the last one
    with an error's text or None. Anything that the parent says meanwhile is to stop; so is its end.
    """
    tally = Tally()
    with contextlib.suppress(BrokenPipeError):  # the parent has died: nobody listens
        try:
            torch.set_num_threads(1)  # the pipeline's threads do the work
            size: dict[str, Any] = {"width": options.width, "height": options.height}
            if options.num_gpus:
                torch.cuda.set_device(number % options.num_gpus)
                size["device_config"] = cuda_config(number % options.num_gpus)
            load = partial(load_image_batch, strict=options.on_error == "raise", **size)
            load([a_small_image()])
            wire.send(tally)
            if (paths := wire.recv()) != "stop":
                name = Path(options.trace or "trace.json")
                with tracing(name.with_name(f"{number}-{name.name}"), enable=bool(options.trace)):
                    consume(options, paths, load, tally, wire)
            wire.send((tally, None))
        except Exception as error:
            errors = getattr(error, "exceptions", [error])  # those inside a failed pipeline
            lines = [line for each in errors for line in traceback.format_exception_only(each)]
            wire.send((tally, "".join(lines).strip()))


def a_small_image() -> bytes:
    """Return a JPEG to load before the clock starts: imports, compilation, the device's context."""
    jpeg = io.BytesIO()
    Image.new("RGB", (16, 16)).save(jpeg, "JPEG")
    return jpeg.getvalue()


def consume(
    options: argparse.Namespace, paths: list[str], load: Any, tally: Tally, wire: Connection
) -> None:
    """Run the pipeline to its end or until the parent says stop."""

    def load_batch(paths: list[str]) -> tuple[Tensor, int]:
        batch = load(paths)
        return batch, len(paths) - len(batch)

    builder = PipelineBuilder().add_source(ListSource(paths)).aggregate(options.batch_size)
    builder.pipe(load_batch, concurrency=options.num_threads, name="load_image_batch")
    pipeline = builder.add_sink(options.queue_size).build(max_failures=0)
    tally.started = reported = time.monotonic()
    with pipeline.auto_stop():
        while not wire.poll():
            try:
                batch, num_skipped = pipeline.get_item(timeout=0.5)
            except TimeoutError:
                continue
            except EOFError:
                break
            if not tally.batches:
                tally.first, tally.first_frames = now(options), len(batch)
            tally.frames += len(batch)
            tally.batches += 1
            tally.skipped += num_skipped
            tally.last = time.monotonic()
            if tally.last - reported > SECONDS_BETWEEN_REPORTS:
                reported = tally.last
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
    paths: list[str]
    """Its share."""
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


def start_workers(options: argparse.Namespace, paths: list[str]) -> Iterator[Worker]:
    """Start the processes, each of which ignores the signals that stop: Ctrl-C goes to the whole
    process group, and it is the parent that says when to stop."""
    context = multiprocessing.get_context("spawn")
    for number in range(options.num_workers):
        share = paths[number :: options.num_workers]
        if options.max_batches is not None:
            each, rest = divmod(options.max_batches, options.num_workers)  # 5 of 2 workers -> 3, 2
            share = share[: (each + (number < rest)) * options.batch_size]
        ours, theirs = context.Pipe()
        process = context.Process(target=work, args=(options, number, theirs), daemon=True)
        handlers = [signal.signal(each, signal.SIG_IGN) for each in STOPS]  # which it inherits
        process.start()
        for each, handler in zip(STOPS, handlers, strict=True):
            signal.signal(each, handler)
        theirs.close()  # so that the end of the worker is the end of the pipe
        device = f"cuda:{number % options.num_gpus}" if options.num_gpus else "cpu"
        name = f"worker {number} ({device})"
        worker = Worker(name=name, process=process, wire=ours, paths=share)
        print(f"{worker.name}: process {process.pid}, {options.num_threads} threads", flush=True)
        yield worker


def load_all(options: argparse.Namespace, paths: list[str]) -> int:
    """Run the workers and print the numbers; return the exit code."""
    began = time.monotonic()
    workers: list[Worker] = []
    stopped_by: list[int] = []

    def on_signal(number: int, _frame: object) -> None:
        stopped_by.append(number)
        if len(stopped_by) > 1:
            raise KeyboardInterrupt  # does not wait for the workers

    for number in STOPS:
        signal.signal(number, on_signal)
    try:
        workers.extend(start_workers(options, paths))
        listen(workers, stopped_by, options.interval)
    except KeyboardInterrupt:
        pass
    finally:
        for worker in workers:
            worker.process.kill()  # nothing, if it has ended
            worker.process.join()
    print_summary(workers)
    if tallies := loaded(workers):
        print(f"start-up, not in the figures: {tallies[0].started - began:.1f} s")
    if stopped_by:
        name = signal.Signals(stopped_by[0]).name
        print(f"stopped by {name}: these are the figures of a part.")
    sys.stdout.flush()
    if failures := [f"{each.name}: {each.failure}" for each in workers if each.failure is not None]:
        print("\n".join(failures), file=sys.stderr)
        return 1
    return 128 + stopped_by[0] if stopped_by else 0


def listen(workers: Sequence[Worker], stopped_by: Sequence[int], interval: float) -> None:
    """Tell the workers to begin together, and to stop at a signal, a failure or a death; return
    when all have ended."""
    said, due = "", float("inf")
    while talking := {worker.wire: worker for worker in workers if not worker.is_done}:
        for wire in connection.wait(list(talking), min(interval, 0.5)):
            talking[wire].read()
        word = said
        if stopped_by or any(worker.failure for worker in workers):
            word = "stop"
        elif not said and all(worker.tally for worker in workers):
            word, due = "go", time.monotonic() + interval
        if word != said:
            said = word
            for worker in workers:
                with contextlib.suppress(OSError):  # it has ended
                    worker.wire.send(worker.paths if word == "go" else word)
        if time.monotonic() >= due:
            print(f"so far: {line(loaded(workers))}", flush=True)
            due += interval


def loaded(workers: Iterable[Worker]) -> list[Tally]:
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
    for worker in workers:
        cut_short = "" if worker.is_done else " (ended before it was done)"
        print(f"{worker.name}: {line(loaded([worker]))}{cut_short}")
    tallies = loaded(workers)
    print(f"all, whole run: {line(tallies)}")
    if tallies:  # what came after the first batch of all
        earliest = min(tallies, key=lambda tally: tally.first)
        frames = sum(tally.frames for tally in tallies) - earliest.first_frames
        batches = sum(tally.batches for tally in tallies) - 1
        seconds = max(tally.last for tally in tallies) - earliest.first
        print(f"all, steady: {rate(frames, batches, seconds)}")
    if num_skipped := sum(tally.skipped for tally in tallies):
        print(f"skipped: {num_skipped:,} files")


def find_paths(options: argparse.Namespace) -> list[str]:
    """Return the paths of the list, or of the images in the folder, sorted."""
    if options.input_flist is not None:
        front = f"{options.prefix.rstrip('/')}/" if options.prefix else ""
        lines = options.input_flist.read_text(encoding="utf-8").split("\n")
        return [front + line.strip() for line in lines if line.strip()]
    walk = os.walk(options.data, followlinks=True)
    found = [os.path.join(place, name) for place, _, names in walk for name in names]
    paths = sorted(path for path in found if os.path.splitext(path)[1].lower() in SUFFIXES)
    if not paths:
        sys.exit(f"--data {options.data}: no images there, by their names ({' '.join(SUFFIXES)}).")
    return paths


def parse() -> argparse.Namespace:
    """Return the options; ``--smoke`` fills in small ones."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    data = parser.add_mutually_exclusive_group(required=True)
    help_list = "a text file, a path or URL a line"
    data.add_argument("--input-flist", type=Path, metavar="FILE", help=help_list)
    data.add_argument("--data", metavar="DIR", help="all images below a folder")
    data.add_argument("--smoke", action="store_true", help="a few made-up photographs")
    add("--prefix", default="", metavar="DIR", help="folder or URL that the list's paths are in")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--num-workers", type=int, help="processes; one per GPU, or one on the CPU")
    add("--num-threads", type=int, help="per worker; its share of the cores, at most 16")
    add("--batch-size", type=int, default=32)
    add("--max-batches", type=int, help="of all workers together")
    add("--queue-size", type=int, default=16, help="finished batches that may wait")
    add("--width", type=int, default=224)
    add("--height", type=int, default=224)
    add("--on-error", choices=("raise", "skip"), default="raise", help="what a bad file does")
    add("--interval", type=float, default=3.0, metavar="S", help="seconds between two reports")
    add("--trace", metavar="FILE.json", help="write a trace of each worker")
    options = parser.parse_args()
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


def main() -> int:
    """Run the program; return the exit code."""
    options = parse()
    with tempfile.TemporaryDirectory() as made:
        if options.smoke:
            options.data = made
            write_photographs(Path(made), 12)
        return load_all(options, find_paths(options))


if __name__ == "__main__":
    sys.exit(main())
