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
import os
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _crew import Boss, Crew

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    LoadBatch = Callable[[list[str]], tuple[Tensor | None, list[str]]]

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"})
SECONDS_BETWEEN_REPORTS = 0.25
NAMES_KEPT = 5
"""Names of skipped files that are printed; their count is always exact."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The work of one process."""

    number: int
    num_workers: int
    flist: str
    prefix: str
    device: str
    """``cpu`` or ``cuda:<index>``."""
    num_threads: int
    batch_size: int
    max_batches: int | None
    queue_size: int
    width: int
    height: int
    skip_bad: bool
    trace: str | None
    trace_batches: int

    def __str__(self) -> str:
        return f"worker {self.number} ({self.device})"


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


def work(job: Job, boss: Boss) -> Tally:
    """Load in a worker process: warm up, wait for the start, and report to the parent."""
    import torch

    torch.set_num_threads(1)  # the pipeline's threads do the work
    tally, load_batch = Tally(), batch_loader(job)
    load_batch([a_small_image()])
    if boss.wait_for_start(tally):
        tally.started = time.monotonic()
        try:
            consume(job, load_batch, tally, boss)
        finally:
            boss.report(tally)  # the message about a failure, which follows, has no numbers
    return tally


def batch_loader(job: Job) -> LoadBatch:
    """Return the stage that does the work: from paths to a batch on the device, with the errors of
    the files that were left out."""
    from spdl_torch.io import load_image_batch

    device_config: Any = None
    if job.device != "cpu":
        import torch

        from spdl_torch.io import cuda_config

        torch.cuda.set_device(job.device)
        device_config = cuda_config(int(job.device.removeprefix("cuda:")))

    def load(paths: list[Any]) -> Tensor:
        return load_image_batch(
            paths, width=job.width, height=job.height, device_config=device_config
        )

    def load_batch(paths: list[Any]) -> tuple[Tensor | None, list[str]]:
        try:
            return load(paths), []
        except (OSError, ValueError):
            if not job.skip_bad:
                raise
        good, bad = sort_out(paths)
        return (load(good) if good else None), bad

    return load_batch


def sort_out(paths: list[str]) -> tuple[list[str], list[str]]:
    """Return the paths that can be decoded, and the errors of the others. Slow, but rare."""
    from spdl_torch.io import decode_image

    good, bad = [], []
    for path in paths:
        try:
            decode_image(path)
        except (OSError, ValueError) as error:
            bad.append(str(error))
        else:
            good.append(path)
    return good, bad


def a_small_image() -> bytes:
    """Return a JPEG to load before the clock starts: imports, compilation, the device's context."""
    from PIL import Image

    jpeg = io.BytesIO()
    Image.new("RGB", (16, 16)).save(jpeg, "JPEG")
    return jpeg.getvalue()


def consume(job: Job, load_batch: LoadBatch, tally: Tally, boss: Boss) -> None:
    """Run the pipeline to its end or until the parent says stop."""
    from spdl_torch.data.sources import FileList
    from spdl_torch.pipeline import PipelineBuilder

    paths: Any = FileList(job.flist, prefix=job.prefix, split=(job.number, job.num_workers))
    if job.max_batches is not None:
        paths = paths[: job.max_batches * job.batch_size]
    builder = PipelineBuilder().add_source(paths).aggregate(job.batch_size)
    builder.pipe(load_batch, concurrency=job.num_threads, name="load_image_batch").add_sink(
        job.queue_size
    )
    reported = tally.started
    # A bad file fails its batch, and with it the run, unless load_batch has left it out.
    with recording(job) as trace, builder.build(max_failures=0).auto_stop() as pipeline:
        while not boss.says_stop():
            try:
                batch, bad = pipeline.get_item(timeout=0.5)
            except TimeoutError:
                continue
            except EOFError:
                break
            count(tally, batch, bad)
            if tally.batches == job.trace_batches:
                trace.close()
            if time.monotonic() - reported > SECONDS_BETWEEN_REPORTS:
                reported = time.monotonic()
                boss.report(tally)
    if tally.batches:
        tally.last = now_of(job.device)


def count(tally: Tally, batch: Tensor | None, bad: list[str]) -> None:
    """Add a batch that arrived."""
    tally.num_skipped += len(bad)
    tally.skipped = [*tally.skipped, *bad][:NAMES_KEPT]
    if batch is None:
        return
    if not tally.batches:
        tally.first, tally.first_frames = now_of(str(batch.device)), len(batch)
    tally.frames += len(batch)
    tally.batches += 1
    tally.last = time.monotonic()


def now_of(device: str) -> float:
    """Return the time once everything that was begun on the device is done."""
    if device != "cpu":
        import torch

        torch.cuda.synchronize(device)
    return time.monotonic()


def recording(job: Job) -> contextlib.ExitStack:
    """Return a trace that runs until it is closed; without ``--trace`` it does nothing."""
    from spdl_torch.observe import tracing

    trace = contextlib.ExitStack()
    if job.trace is not None:
        # a.json and a.json.gz: the worker's number goes before the endings
        path = Path(job.trace)
        name = path.name.removesuffix(".gz").removesuffix(".json")
        path = path.with_name(path.name.replace(name, f"{name}-{job.number}", 1))
        trace.enter_context(tracing(path))
    return trace


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """The frames and batches that arrived in a span of time."""

    frames: int
    batches: int
    seconds: float

    def __str__(self) -> str:
        if not self.batches or self.seconds <= 0:
            return "too little to measure"
        fps, bps = self.frames / self.seconds, self.batches / self.seconds
        return f"{fps:,.1f} FPS, {bps:,.2f} BPS"


def whole_run(tallies: Sequence[Tally]) -> Rate:
    """Return the rate of everything, from the first start to the last batch of all."""
    seconds = 0.0
    if tallies:
        seconds = max(tally.last for tally in tallies) - min(tally.started for tally in tallies)
    return Rate(
        frames=sum(tally.frames for tally in tallies),
        batches=sum(tally.batches for tally in tallies),
        seconds=seconds,
    )


def steady(tallies: Sequence[Tally]) -> Rate:
    """Return the rate after the first batch of all, from then to the last of all."""
    everything = whole_run(tallies)
    if not tallies:
        return everything
    earliest = min(tallies, key=lambda tally: tally.first)
    return Rate(
        frames=everything.frames - earliest.first_frames,
        batches=everything.batches - 1,
        seconds=max(tally.last for tally in tallies) - earliest.first,
    )


def line(tallies: Sequence[Tally]) -> str:
    """Return the amount and the rate, as text."""
    rate = whole_run(tallies)
    amount = f"{rate.frames:,} frames, {rate.batches:,} batches in {rate.seconds:.2f} s"
    return f"{amount}: {rate}"


def loaded_by(crew: Crew) -> list[Tally]:
    """Return the tallies of the workers that have loaded anything."""
    return [worker.report for worker in crew.workers if worker.report and worker.report.batches]


def summary(crew: Crew) -> str:
    """Return the numbers of each worker and of all of them, as text."""
    tallies = loaded_by(crew)
    lines = []
    for worker in crew.workers:
        own = [worker.report] if worker.report in tallies else []
        cut_short = "" if worker.is_done else " (ended before it was done)"
        lines.append(f"{worker.job}: {line(own)}{cut_short}")
    lines += [f"all, whole run: {line(tallies)}", f"all, steady: {steady(tallies)}"]
    reports = [worker.report for worker in crew.workers if worker.report]
    if num_skipped := sum(report.num_skipped for report in reports):
        lines.append(f"skipped: {num_skipped:,} files, among them")
        reasons = [reason for report in reports for reason in report.skipped]
        lines += [f"  {reason}" for reason in reasons[:NAMES_KEPT]]
    if crew.signal is not None:
        name = signal.Signals(crew.signal).name
        lines.append(f"stopped by {name}: these are the figures of a part.")
    return "\n".join(lines)


def load_all(jobs: list[Job], interval: float) -> int:
    """Run the workers and print the numbers; return the exit code."""
    began = time.monotonic()
    with Crew(work, jobs) as crew:
        for worker in crew.workers:
            threads = f"{worker.job.num_threads} threads"
            print(f"{worker.job}: process {worker.process.pid}, {threads}", flush=True)
        crew.run(lambda: print(f"so far: {line(loaded_by(crew))}", flush=True), interval)
    print(summary(crew))
    if tallies := loaded_by(crew):
        print(f"start-up, not in the figures: {tallies[0].started - began:.1f} s")
    sys.stdout.flush()
    if failures := crew.failures():
        print("\n".join(failures), file=sys.stderr)
        return 1
    return 0 if crew.signal is None else 128 + crew.signal


def jobs_of(options: argparse.Namespace, flist: str) -> list[Job]:
    """Return the jobs: one for each GPU, or for each process on the CPU."""
    num_gpus = count_gpus() if options.device != "cpu" else 0
    if options.device == "cuda" and not num_gpus:
        sys.exit("--device cuda: torch finds no GPU. Use --device cpu.")
    from spdl_torch.autotune import Limits

    num_workers = options.num_workers or num_gpus or 1
    share_of_cores = int(Limits.of_this_machine().num_cores) // num_workers
    return [
        Job(
            number=number,
            num_workers=num_workers,
            flist=flist,
            prefix=options.prefix,
            device=f"cuda:{number % num_gpus}" if num_gpus else "cpu",
            num_threads=options.num_threads or max(min(share_of_cores, 16), 1),
            batch_size=options.batch_size,
            max_batches=most_batches(options, number, num_workers),
            queue_size=options.queue_size,
            width=options.width,
            height=options.height,
            skip_bad=options.on_error == "skip",
            trace=options.trace,
            trace_batches=options.trace_batches,
        )
        for number in range(num_workers)
    ]


def most_batches(options: argparse.Namespace, number: int, num_workers: int) -> int | None:
    """Return how many a worker loads, None = all: ``--max-batches 5, 2 workers -> 3, 2``."""
    limits = [] if options.worker_max_batches is None else [options.worker_max_batches]
    if options.max_batches is not None:
        each, rest = divmod(options.max_batches, num_workers)
        limits.append(each + (number < rest))
    return min(limits, default=None)


def count_gpus() -> int:
    """Return how many GPUs torch sees."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


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
            from spdl_torch.measuring.photographs import write_photographs

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
    add(
        "--prefix", default="", metavar="DIR", help="the folder or URL that the list's paths are in"
    )
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
        return load_all(jobs_of(options, flist), options.interval)


if __name__ == "__main__":
    sys.exit(main())
