"""What loading costs the training step: a trainer that launches small operations, beside a loader.

The trainer is the worst case for threads in its process: a step is 24,000 times ``x.add_(1)`` on 8
floats, nothing but the interpreter launching operations. Beside it one worker loads photographs
(batches of 32 at 224 x 224) as fast as it can:

- ours: DataLoader, 1 thread, one call a batch (``spdl_torch.io.load_image_batch``);
- eager: a bare thread that makes four calls an image: read, decode, resize, copy;
- torch: its DataLoader with torchvision's codec, 1 worker process;
- SPDL's pipeline with its ``load_image_batch`` (bilinear), 1 thread;
- nothing: no loader at all; how far it is from 1 is the noise.

So that the loader never rests, a thread of its own takes every batch as soon as it is there; what
that costs (torch rebuilds the batch from shared memory in it) a trainer would pay too.

A measurement is a fresh process in which blocks of steps alternate, one without a loader and
one beside it, in full swing. ``step`` is the median, over the pairs of adjacent blocks, of the
loaded block's time over the other's, so that a machine that grows slower does not count.
``images/s`` is what the loader did meanwhile.

Goal: ours at most 1.08.

    python examples/benchmark_step.py [--data DIR] [--rounds N] [--json FILE] [--smoke]
"""

from __future__ import annotations

import itertools
import threading
import time
import warnings
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, Self

import torch
from _bench import (
    Goal,
    Metric,
    Report,
    argument_parser,
    in_fresh_process,
    interleaved,
    jpegs,
    machine,
    photographs,
    run_program,
    spdl_decoder,
)
from benchmark_images import (
    BATCH,
    PIXELS,
    load_torchvision,
    our_loader,
    spdl_pipeline,
    torch_loader,
)

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Sequence

GROUPS = 40
OPERATIONS = 600
"""In a group; a step is ``GROUPS`` of them."""
METRICS = (
    Metric(key="step_ratio", heading="step / step without loading", digits=3),
    Metric(key="step_ms", heading="step without loading, ms", digits=1),
    Metric(key="images_per_second", heading="images/s meanwhile"),
)


def main(options: argparse.Namespace) -> Report:
    """Measure every loader that is installed."""
    pairs, steps, files = (2, 1, 16) if options.smoke else (8, 5, 200)
    with spdl_decoder() as no_spdl, photographs(options.data, files) as folder:
        rows = [row for row in ROWS if not (no_spdl and row == SPDL)]
        report = Report(
            title="The training step beside one worker that loads photographs",
            metrics=METRICS,
            settings=machine(files=len(jpegs(folder)), pairs=pairs, rounds=options.rounds),
            remarks=[no_spdl] if no_spdl else [],
        )
        measure_one = partial(
            in_fresh_process, __file__, folder=str(folder), pairs=pairs, steps=steps
        )
        interleaved(report, rows, options.rounds, lambda row: measure_one(row=row))
    goal = partial(Goal, metric="step_ratio", row=OURS)
    report.goals = [
        goal(at_most=1.08),
        *(goal(over=row) for row in rows if row != OURS),
    ]
    return report


def measure(row: str, folder: str, pairs: int, steps: int) -> dict[str, float]:
    """Blocks of ``steps`` steps in ``pairs``, in this process."""
    torch.set_num_threads(1)
    train = Trainer()
    make_batches = ROWS[row](jpegs(folder))
    ratios, seconds, images, loading = [], [], 0, 0.0
    for number in range(pairs):
        # Every other pair begins with the other block, so that a drift cancels within two pairs.
        block: dict[bool, float] = {}
        for with_loader in (False, True) if number % 2 == 0 else (True, False):
            if not with_loader:
                block[False] = train(steps)
                continue
            with Consumer(make_batches) as consumer:
                before = consumer.num_images
                block[True] = train(steps)
                images += consumer.num_images - before
            loading += block[True]
        ratios.append(block[True] / block[False])
        seconds.append(block[False] / steps)
    return {
        "step_ratio": median(ratios),
        "step_ms": median(seconds) * 1e3,
        "images_per_second": images / loading,
    }


class Trainer:
    """Launches small operations without a pause."""

    def __init__(self) -> None:
        self._x = torch.zeros(8)

    def __call__(self, steps: int) -> float:
        """Do ``steps`` steps; return their seconds."""
        x = self._x
        start = time.perf_counter()
        for _ in range(steps * GROUPS):
            for _ in range(OPERATIONS):
                x.add_(1)
        return time.perf_counter() - start


class Consumer:
    """A loader that runs, and the thread that takes every batch as soon as it is there.

    On entry it waits for the first batches, on exit for the loader's end.
    """

    _NUM_FIRST = 2

    def __init__(self, make_batches: Callable[[], Iterator[Any]]) -> None:
        self.num_images = 0
        self._make_batches = make_batches
        self._running = threading.Event()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="consumer")

    def __enter__(self) -> Self:
        self._thread.start()
        self._running.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = True
        self._thread.join()

    def _run(self) -> None:
        try:
            for number, batch in enumerate(self._make_batches(), 1):
                self.num_images += len(batch)
                if number == self._NUM_FIRST:
                    self._running.set()
                if self._ended:
                    return  # drops the iterator, which ends the loader
        finally:
            self._running.set()


def endless(paths: Sequence[str]) -> list[str]:
    """Far more than will be read."""
    return list(itertools.islice(itertools.cycle(paths), 100_000))


def eager(paths: Sequence[str]) -> Callable[[], Iterator[Any]]:
    """Four calls an image, on the consumer's thread: there is no loader's thread besides."""
    from torch.nn.functional import interpolate
    from torchvision.io import ImageReadMode, decode_jpeg, read_file

    warnings.simplefilter("ignore", DeprecationWarning)  # torchvision 0.29 points to torchcodec

    def batches() -> Iterator[torch.Tensor]:
        remaining = itertools.cycle(paths)
        batch = torch.empty(
            (BATCH, 3, PIXELS, PIXELS), dtype=torch.uint8, memory_format=torch.channels_last
        )
        while True:
            for place, path in zip(batch, remaining, strict=False):
                image = decode_jpeg(read_file(path), mode=ImageReadMode.RGB)[None]
                size = (PIXELS, PIXELS)
                place.copy_(interpolate(image, size, mode="bilinear", antialias=True)[0])
            yield batch

    return batches


OURS = "ours"
SPDL = "SPDL"
ROWS: dict[str, Callable[[Sequence[str]], Callable[[], Iterator[Any]]]] = {
    OURS: lambda paths: our_loader(endless(paths), num_workers=1),
    "eager": eager,
    "torch": lambda paths: torch_loader(endless(paths), load=load_torchvision, num_workers=1),
    SPDL: lambda paths: spdl_pipeline(endless(paths), bilinear=True, num_workers=1),
    "nothing": lambda paths: lambda: iter(()),
}


if __name__ == "__main__":
    run_program(main, argument_parser(__doc__, rounds=5), child=measure)
