"""``draws``: the price of random streams, for calls that draw a number and for calls that do not.

A sample makes one call, in batches of 64: in a plain loop; with the streams of a worker thread; and
with those of the trainer's thread, where batches are made without workers. A draw has to seed its
sample's stream first. Then come the functions of ``random`` and ``numpy.random`` on the trainer's
thread, before and after the first loader. The last rows go from ``import`` to the first batch of a
loader without workers, once torch itself is imported, with bytecode as an installed package has it.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import spdl_torch

from .report import Goal, Metric
from .tables import Contender, Table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .reporter import Reporter
    from .tables import BenchOptions

    Call = Callable[[], object]


_BATCH = 64
_PASSES = 9
_FIRST = "import and first batch"
_PROCESS = "the trainer's thread"
_us = partial(Metric, digits=2, higher_is_better=False)
METRICS = (
    _us(key="plain_us", heading="no streams, µs"),
    _us(key="worker_us", heading="worker thread, µs"),
    _us(key="worker_ratio", heading="over no streams"),
    _us(key="worker_more_us", heading="more than that, µs"),
    _us(key="inline_us", heading="0 workers, µs"),
    _us(key="inline_ratio", heading="over no streams"),
    _us(key="inline_more_us", heading="more than that, µs"),
    _us(key="before_us", heading="before the first loader, µs", section=_PROCESS),
    _us(key="after_us", heading="after it, µs", section=_PROCESS),
    Metric(key="first_ms", heading="ms", digits=1, higher_is_better=False, section=_FIRST),
)


def _add() -> Call:
    import torch

    x = torch.ones(64)
    return lambda: x + 1


def _index() -> Call:
    import torch

    x = torch.ones(64, 64)
    return lambda: x[0]


def _sum() -> Call:
    import torch

    return torch.ones(64).sum


def _rand() -> Call:
    import torch

    return partial(torch.rand, 1)


def _uniform() -> Call:
    import torch

    return torch.empty(1).uniform_


def _randint() -> Call:
    import torch

    return partial(torch.randint, 0, 10, (1,))


def _crop_and_flip() -> Call:
    import torch
    from torchvision.transforms import v2

    transform = v2.Compose([v2.RandomResizedCrop(24, antialias=True), v2.RandomHorizontalFlip()])
    picture = torch.zeros(3, 32, 32, dtype=torch.uint8)
    return partial(transform, picture)


def _measure_call(make_call: Callable[[], Call], seconds: float) -> dict[str, float]:
    """Measure a call on both kinds of threads."""
    found: dict[str, tuple[float, float]] = {}

    def measure(name: str) -> None:
        found[name] = _plain_and_streams(make_call(), seconds)

    measure("inline")
    thread = threading.Thread(target=measure, args=("worker",))
    thread.start()
    thread.join()
    figures = {"plain_us": 1e6 * found["worker"][0]}
    for name, (plain, streams) in found.items():
        figures[f"{name}_us"], figures[f"{name}_ratio"] = 1e6 * streams, streams / plain
        figures[f"{name}_more_us"] = 1e6 * (streams - plain)
    return figures


def _plain_and_streams(call: Call, seconds: float) -> tuple[float, float]:
    """Return the seconds a sample takes without streams and with them, on the thread's CPU clock:
    the least of several passes in turns, since other programs only add to it.
    """
    from spdl_torch.loader.rng.keys import StreamKey
    from spdl_torch.loader.rng.streams import SampleStreams

    key, streams = StreamKey(0), SampleStreams(0)
    batches = max(2, int(seconds / 4 / _PASSES / _BATCH / _plain(call, 4)))
    passes = [
        (_plain(call, batches), _with_streams(call, batches, streams, key)) for _ in range(_PASSES)
    ]
    plain, own = (min(times) for times in zip(*passes, strict=True))
    return plain, own


def _plain(call: Call, batches: int) -> float:
    start = time.thread_time()
    for _ in range(batches):
        samples: list[object] = []
        for _ in range(_BATCH):
            samples.append(call())  # noqa: PERF401 - as the loader makes them
    return (time.thread_time() - start) / batches / _BATCH


def _with_streams(call: Call, batches: int, streams: Any, key: Any) -> float:
    indices = list(range(_BATCH))
    start = time.thread_time()
    for number in range(batches):
        samples: list[object] = []
        with streams:
            streams.begin(key, number * _BATCH)
            for _ in streams.over(iter(indices), _BATCH):
                samples.append(call())  # noqa: PERF401 - as in the plain loop
    return (time.thread_time() - start) / batches / _BATCH


def _shuffle() -> Call:
    return partial(random.shuffle, list(range(1000)))


def _numpys_rand() -> Call:
    import numpy as np

    # By name at each call, as user code does: the name is what a loader replaces.
    return lambda: np.random.rand()


def _measure_functions(make_call: Callable[[], Call], seconds: float) -> dict[str, float]:
    """Measure a function on a thread that runs no loader, before the patches and with them."""
    from spdl_torch.loader.rng.patches import install

    figures = {}
    for key in ("before_us", "after_us"):
        if key == "after_us":
            install()
        call = make_call()
        count = max(4, int(seconds / 4 / _PASSES / _passed(call, 4)))
        figures[key] = 1e6 * min(_passed(call, count) for _ in range(_PASSES))
    return figures


def _passed(call: Call, count: int) -> float:
    start = time.thread_time()
    for _ in range(count):
        call()
    return (time.thread_time() - start) / count


PROGRAM = """
import time, torch
start = time.perf_counter()
from {module} import DataLoader
next(iter(DataLoader(range(64), batch_size=8)))
print(1e3 * (time.perf_counter() - start))
"""
"""From the import to the first batch, in a process that has imported torch alone."""


def _measure_first(module: str, folder: str, runs: int) -> dict[str, float]:
    """Measure the last run: the first leaves the bytecode that later ones find."""
    package = Path(folder) / "spdl_torch"
    if not package.exists():  # a copy: the sources themselves get no folders of bytecode
        source = Path(spdl_torch.__file__).parent
        shutil.copytree(source, package, ignore=shutil.ignore_patterns("__pycache__"))
    environment = {**os.environ, "PYTHONPATH": folder}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-c", PROGRAM.format(module=module)]
    printed = ""
    for _ in range(runs):
        done = subprocess.run(
            command, env=environment, cwd=folder, capture_output=True, text=True, check=True
        )
        printed = done.stdout
    return {"first_ms": float(printed)}


def measure(contender: Contender, settings: dict[str, Any], reporter: Reporter) -> dict[str, float]:
    """Measure one call, one function of the process, or the first batch of a loader."""
    if contender.name in _FIRSTS:
        return _measure_first(contender.run(), settings["folder"], settings["runs"])
    if contender.name in _FUNCTIONS:
        return _measure_functions(contender.run, settings["seconds"])
    import torch

    torch.set_num_threads(1)
    return _measure_call(contender.run, settings["seconds"])


@contextlib.contextmanager
def _prepare(options: BenchOptions) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="spdl-torch-bench-") as folder:
        seconds, runs = (1e-3, 1) if options.smoke else (options.seconds, 2)
        yield {"seconds": seconds, "runs": runs, "folder": folder}


_DRAWS_NOTHING = {"x + 1": _add, "x[0]": _index, "x.sum()": _sum}
_ONE_DRAW = {"rand(1)": _rand, "x.uniform_()": _uniform, "randint": _randint}
_DRAWS = {**_ONE_DRAW, "RandomResizedCrop, flip": _crop_and_flip}
_FUNCTIONS = {
    "random.random()": lambda: random.random,
    "random.randint(0, 9)": lambda: partial(random.randint, 0, 9),
    "random.shuffle, 1000": _shuffle,
    "np.random.rand()": _numpys_rand,
}
_OURS, _TORCH = "ours, import and first batch", "torch, import and first batch"
_FIRSTS = {_TORCH: lambda: "torch.utils.data", _OURS: lambda: "spdl_torch"}
TABLES = {
    "draws": Table(
        name="draws",
        title="The price of random streams, a sample that makes one call",
        metrics=METRICS,
        contenders=(
            *(
                Contender(name=name, run=run, smoke=name in ("x + 1", "rand(1)"))
                for name, run in {**_DRAWS_NOTHING, **_DRAWS}.items()
            ),
            *(
                Contender(name=name, run=run, smoke=name in ("random.random()", _OURS))
                for name, run in {**_FUNCTIONS, **_FIRSTS}.items()
            ),
        ),
        prepare=_prepare,
        measure=measure,
        goals=(
            *(
                Goal(metric=metric, row=name, at_most=1.05)
                for name in _DRAWS_NOTHING
                for metric in ("worker_ratio", "inline_ratio")
            ),
            *(
                Goal(metric=f"{kind}_more_us", row=name, at_most=most)
                for name in _ONE_DRAW
                for kind, most in (("worker", 12), ("inline", 5))
            ),
            Goal(metric="first_ms", row=_OURS, over=_TORCH),
        ),
    )
}
