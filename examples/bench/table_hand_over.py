"""``hand-over``: what the thread that trains spends on a batch, with ``device=`` and without.

The device is one that does nothing: copies are done at once, events have always passed. So the
times are our own share; CUDA's calls (two events, a wait, one mark for each tensor) come on top.
The rows of a GPU, with ``--full``, have these, too.
The first column is what comes between the model's steps in any case: receiving the batch, waiting
for its copy and handing it over. The second is what it takes to request another one; the third is
both. Before each ``next()`` come 4 ms, as for a step of a model, so that the batch is ready.
torch's loader has no device: on a GPU the loop moves the batch itself.
"""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.utils.data

import spdl_torch
from spdl_torch.io._transfer import cuda
from spdl_torch.io._transfer.readers import Readers

from .report import Goal, Metric
from .tables import Contender, Table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from .tables import BenchOptions

_BATCH = 8
_STEP_SECONDS = 0.004
_WARM_UP = 20
_ASKING = ("_fill", "_try_put_index")
"""The methods of our iterators, and of torch's, that request a batch: drawing its indices, and
giving them to a worker."""
METRICS = (
    Metric("receiving_us", "CPU µs/batch: receive and hand over, median"),
    Metric("asking_us", "ask for the next, median"),
    Metric("median_us", "all of next(), median"),
    Metric("least_us", "10th percentile"),
    Metric("allocations", "tensors made by the thread"),
)


def _prepare(options: BenchOptions, folder: Path) -> dict[str, Any]:
    return {"batches": 20 if options.smoke else max(50, int(options.seconds / _STEP_SECONDS))}


class Pictures:
    """Small pictures, made in no time."""

    thread_safe = True

    def __init__(self, count: int) -> None:
        self.picture = torch.zeros(3, 64, 64, dtype=torch.uint8)
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.picture, index


class Idle:
    """A device that does nothing, in place of CUDA's backend."""

    made_by: list[int] = []  # noqa: RUF012  # one process measures one loader
    """The threads that allocated memory on it."""

    def __init__(self, device: Any, stream: int = 0, *, use: str = "copy") -> None:
        self.device = device
        self.readers = Readers()

    def current_stream(self) -> int:
        return 0

    def mark(self, stream: int) -> Idle:
        return self

    def lock_pages(self, address: int, num_bytes: int) -> bool:
        return True

    def unlock_pages(self, address: int) -> None:
        """Do nothing: nothing is locked."""

    def pinned(self, num_bytes: int) -> Any:
        return torch.empty(num_bytes, dtype=torch.uint8)

    torchs_pinned = pinned

    def is_pinned(self, tensor: Any) -> bool:
        return False

    def on_copy_stream(self) -> Any:
        return contextlib.nullcontext()

    def empty(self, num_bytes: int) -> Any:
        self.made_by.append(threading.get_ident())
        return self.pinned(num_bytes)

    def copy(self, target: Any, source: Any) -> None:
        target.copy_(source)

    def record(self) -> Idle:
        return self

    def hand_over(self, event: Any, blocks: Sequence[Any]) -> Idle:
        return self

    def synchronize(self) -> None:
        """Return at once: everything is done."""

    def query(self) -> bool:
        return True


def ours(dataset: Any, num_workers: int, isolation: Any, device: str | None) -> Any:
    """Return our loader."""
    place = "cuda" if device == "idle" else device
    options = {"num_workers": num_workers, "isolation": isolation, "device": place}
    return spdl_torch.DataLoader(dataset, _BATCH, **options)


def torchs(dataset: Any, num_workers: int, device: str | None) -> Any:
    """Return torch's loader."""
    pin = device is not None
    return torch.utils.data.DataLoader(dataset, _BATCH, num_workers=num_workers, pin_memory=pin)


def measure(contender: Contender, settings: dict[str, Any]) -> dict[str, float]:
    """Measure one pass."""
    dataset = Pictures(_BATCH * (settings["batches"] + _WARM_UP))
    loader = contender.run(dataset, settings["num_workers"], **contender.arguments)
    device = contender.arguments["device"]
    Idle.made_by.clear()
    a_gpu = torch.device("cuda", 0)  # for which the stand-in is taken
    stand_in = mock.patch.multiple(cuda, CudaBackend=Idle, resolve=lambda place: a_gpu)
    with stand_in if device == "idle" else contextlib.nullcontext():
        batches = iter(loader)
    move = _moved if device == "cuda" and contender.run is torchs else None
    took = hand_overs(batches, settings["batches"], partial(_settle, device), move)
    receiving, asking = zip(*took, strict=True)
    totals = list(map(sum, took))
    return {
        "receiving_us": statistics.median(receiving),
        "asking_us": statistics.median(asking),
        "median_us": statistics.median(totals),
        "least_us": statistics.quantiles(totals, n=10)[0],
        "allocations": Idle.made_by.count(threading.get_ident()),
    }


def _moved(batch: Any) -> Any:
    return [each.to("cuda", non_blocking=True) for each in batch]


def _settle(device: str | None) -> None:
    """Return when the next batch has arrived."""
    if device == "cuda":
        torch.cuda.synchronize()
    time.sleep(_STEP_SECONDS)


def hand_overs(
    batches: Iterator[Any],
    num_batches: int,
    settle: Callable[[], object],
    move: Callable[[Any], Any] | None = None,
) -> list[tuple[float, float]]:
    """Measure the CPU time of this thread in ``num_batches`` calls of ``next``, after ``_WARM_UP``
    others; waiting does not count.

    settle: called before each; returns when the next batch is probably there. With our iterators,
        it is then waited for: what a thread does to wait for a batch is not part of a hand-over.
    move: what the loop does to have the batch on the device, as a part of receiving it; None: it is
        there.
    Returns: of each, in µs: receiving (taking the batch, making the model's stream wait for it,
        guarding its memory, and noting how far the epoch is), and asking for another one. Without
        workers nothing is asked for ahead, and receiving has it all.
    """
    asked_ns = 0

    def timed(ask: Callable[[], Any]) -> Any:
        nonlocal asked_ns
        start_ns = time.thread_time_ns()
        try:
            return ask()
        finally:
            asked_ns += time.thread_time_ns() - start_ns

    names = [name for name in _ASKING if hasattr(batches, name)]
    for name in names:
        setattr(batches, name, partial(timed, getattr(batches, name)))
    took = []
    try:
        for _ in range(_WARM_UP + num_batches):
            settle()
            _wait_for_batch(batches)
            asked_ns, start_ns = 0, time.thread_time_ns()
            batch = next(batches)
            if move is not None:
                batch = move(batch)
            total_ns = time.thread_time_ns() - start_ns
            took.append(((total_ns - asked_ns) / 1e3, asked_ns / 1e3))
            del batch
    finally:
        for name in names:  # back to its own methods, which do not keep it alive
            delattr(batches, name)
    return took[_WARM_UP:]


def _wait_for_batch(batches: Any) -> None:
    """Wait until the workers have a batch ready, or will have none. Batches that the loop reads
    itself, of processes, are not waited for: nothing but ``next`` would find them."""
    outlet: Any = getattr(batches, "_outlet", ())  # torch's has none, and () has no batch ever
    if hasattr(outlet, "heard"):  # of processes, as this thread reads what they send
        return
    while outlet != () and not len(outlet) and not outlet.closed:
        time.sleep(0.001)


def _ours(name: str, isolation: str, device: str | None, **more: Any) -> Contender:
    arguments = {"isolation": isolation, "device": device}
    return Contender(f"ours, {name}", ours, arguments=arguments, **more)


TABLE = Table(
    name="hand-over",
    title=f"The thread that trains, for each batch of {_BATCH} small pictures",
    metrics=METRICS,
    contenders=(
        _ours("threads, device", "thread", "idle", smoke=True),
        _ours("processes, device", "process", "idle"),
        _ours("threads", "thread", None),
        _ours("processes", "process", None),
        Contender("torch", torchs, arguments={"device": None}),
        _ours("threads, GPU", "thread", "cuda", is_usual=False),
        _ours("processes, GPU", "process", "cuda", is_usual=False),
        Contender("torch, GPU", torchs, arguments={"device": "cuda"}, is_usual=False),
    ),
    prepare=_prepare,
    measure=measure,
    peer="torch",
    goals=(
        Goal("receiving_us", "ours, threads, device", at_most=40),
        Goal("receiving_us", "ours, processes, device", at_most=40),
        Goal("allocations", "ours, threads, device", at_most=1),
        Goal("allocations", "ours, processes, device", at_most=1),
        Goal("receiving_us", "ours, threads, GPU", "torch, GPU", at_most=1.0),
        Goal("receiving_us", "ours, processes, GPU", "torch, GPU", at_most=1.0),
    ),
)
