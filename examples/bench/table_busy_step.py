"""``busy-step``: a trainer that wants the interpreter all the time, beside a loader in full swing.

It is the worst case for threads in its process: a step is 24,000 times ``x.add_(1)`` on 8 floats,
nothing but the interpreter launching operations. Beside it one worker loads photographs (batches
of 32 at 224 x 224) as fast as it can. So that the loader never rests, a thread takes every batch as
soon as it is ready; a trainer would also pay what that costs (in it, torch rebuilds the batch from
shared memory).

Blocks of steps alternate, one without a loader and one beside it. ``step`` is the median, over the
pairs of adjacent blocks, of the loaded block's time over the other's, so that a machine that grows
slower does not count.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, Self

from . import images, table_photographs
from .image_peers import spdl_decoding
from .loaders import ours, torch_loader
from .report import Goal, Metric
from .tables import Contender, Table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .loaders import Batches, Work
    from .reporter import Reporter
    from .tables import BenchOptions

_BATCH = 32
_ENDLESS = 100_000
"""Photographs: far more than will be read."""
_OPERATIONS = 24_000
METRICS = (
    Metric(
        key="step_ratio",
        heading="step / step without loading",
        digits=3,
        higher_is_better=False,
    ),
    Metric(key="step_ms", heading="step without loading, ms", digits=1, higher_is_better=False),
    Metric(key="per_second", heading="images/s meanwhile"),
)


@contextlib.contextmanager
def _prepare(options: BenchOptions) -> Iterator[dict[str, Any]]:
    with images.photographs_for_all(options) as found:
        yield {
            **found,
            "crop": False,
            "num_workers": 1,  # the trainer has the other one of two cores
            "batch_size": 4 if options.smoke else _BATCH,
            "pairs": 2 if options.smoke else 8,
            "steps": 1 if options.smoke else max(1, round(2.5 * options.seconds)),
            "operations": _OPERATIONS // 20 if options.smoke else _OPERATIONS,
        }


def measure(contender: Contender, settings: dict[str, Any], reporter: Reporter) -> dict[str, float]:
    """Measure pairs of blocks; every other pair begins with the other block, so that a drift
    cancels."""
    import torch

    torch.set_num_threads(1)
    train, steps = Trainer(settings["operations"]), settings["steps"]
    work = table_photographs.make_work(settings, _ENDLESS, **contender.arguments)
    work.load_group([0])
    make_batches = contender.run(work)
    reporter.phase("training", settings["pairs"])
    ratios, seconds, count, loading = [], [], 0, 0.0
    for number in range(settings["pairs"]):
        block: dict[bool, float] = {}
        for with_loader in (False, True) if number % 2 == 0 else (True, False):
            if not with_loader:
                block[False] = train(steps)
                continue
            with Consumer(make_batches, work.size_of) as consumer:
                before = consumer.num_images
                block[True] = train(steps)
                count += consumer.num_images - before
            loading += block[True]
        ratios.append(block[True] / block[False])
        seconds.append(block[False] / steps)
        reporter.done(number + 1)
    return {
        "step_ratio": median(ratios),
        "step_ms": median(seconds) * 1e3,
        "per_second": count / loading,
    }


class Trainer:
    """Launches small operations without a pause."""

    def __init__(self, operations: int) -> None:
        import torch

        self._x = torch.zeros(8)
        self._operations = operations

    def __call__(self, steps: int) -> float:
        """Do ``steps`` steps; return their seconds."""
        x = self._x
        start = time.perf_counter()
        for _ in range(steps * self._operations):
            x.add_(1)
        return time.perf_counter() - start


class Consumer:
    """A running loader, and the thread that takes every batch as soon as it is ready.

    On entry it waits for the first batches, on exit for the loader's end. An error in the loader is
    raised on exit.
    """

    _NUM_FIRST = 2

    def __init__(self, make_batches: Batches, size_of: Any) -> None:
        self.num_images = 0
        self._make_batches = make_batches
        self._size_of = size_of
        self._running = threading.Event()
        self._ended = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="consumer")

    def __enter__(self) -> Self:
        self._thread.start()
        self._running.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = True
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            for number, batch in enumerate(self._make_batches(), 1):
                self.num_images += self._size_of(batch)
                if number == self._NUM_FIRST:
                    self._running.set()
                if self._ended:
                    return  # drops the iterator, which ends the loader
        except BaseException as error:
            self._error = error  # the trainer's thread raises it
        finally:
            self._running.set()


def eager(work: Work) -> Batches:
    """Four calls per image (read, decode, resize, copy) on the consumer's thread, no loader."""
    import torch

    def begin() -> Iterator[Any]:
        shape = (work.batch_size, 3, images.PIXELS, images.PIXELS)
        batch = torch.empty(shape, dtype=torch.uint8, memory_format=torch.channels_last)
        for index in itertools.count(step=work.batch_size):
            for place, picture in enumerate(batch):
                picture.copy_(work.dataset[(index + place) % work.num_samples])
            yield batch

    return begin


_spdl = partial(spdl_decoding, crop=False)


def nothing(work: Work) -> Batches:
    """No loader at all: how far its ratio is from 1 is the noise."""
    return lambda: iter(())


def _one(name: str, run: Any, data: str, *needs: str, **more: Any) -> Contender:
    return Contender(name=name, run=run, needs=needs, arguments={"data": data}, **more)


_goal = partial(Goal, metric="step_ratio", row="ours, threads")
TABLES = {
    "busy-step": Table(
        name="busy-step",
        title="A trainer that holds the GIL, beside one worker that loads photographs",
        metrics=METRICS,
        contenders=(
            _one("ours, threads", ours, "batched", smoke=True),
            _one("ours, process", partial(ours, isolation="process"), "batched"),
            _one("eager", eager, "torchvision", smoke=True),
            _one("torch, forked", torch_loader, "torchvision"),
            _one("SPDL", _spdl, "pillow", "spdl", decodes_with_spdl=True),
            _one("nothing", nothing, "batched"),
        ),
        prepare=_prepare,
        measure=measure,
        goals=(
            _goal(at_most=1.08),
            _goal(over="eager"),
            _goal(over="torch, forked"),
            _goal(over="SPDL"),
            _goal(over="nothing"),
        ),
        passes=3,
    )
}
