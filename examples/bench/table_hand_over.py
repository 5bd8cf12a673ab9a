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
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from .hand_over import WARM_UP, hand_overs
from .report import Goal, cost
from .tables import Contender, Table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from .tables import BenchOptions

BATCH = 8
_STEP_SECONDS = 0.004
METRICS = (
    cost("receiving_us", "CPU µs/batch: receive and hand over, median"),
    cost("asking_us", "ask for the next, median"),
    cost("median_us", "all of next(), median"),
    cost("least_us", "10th percentile"),
    cost("allocations", "tensors made by the thread"),
)


def _prepare(options: BenchOptions, folder: Path) -> dict[str, Any]:
    return {"batches": 20 if options.smoke else max(50, int(options.seconds / _STEP_SECONDS))}


class Pictures:
    """Small pictures, made in no time."""

    thread_safe = True

    def __init__(self, count: int) -> None:
        import torch

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
        from spdl_torch.io._transfer.readers import Readers

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
        import torch

        return torch.empty(num_bytes, dtype=torch.uint8)

    torchs_pinned = pinned

    def is_pinned(self, tensor: Any) -> bool:
        return False

    def on_copy_stream(self) -> Any:
        return contextlib.nullcontext()

    def empty(self, num_bytes: int) -> Any:
        import threading

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
    from spdl_torch.loader.dataloader import DataLoader

    place = "cuda" if device == "idle" else device
    options = {"num_workers": num_workers, "isolation": isolation, "device": place}
    return DataLoader(dataset, BATCH, **options)


@contextlib.contextmanager
def _idle_device() -> Iterator[None]:
    """Make transfers created in the block go to a device that does nothing."""
    import torch

    from spdl_torch.io._transfer import cuda

    def resolve(place: torch.device) -> torch.device:
        """Return the GPU for which the stand-in is taken."""
        return torch.device("cuda", 0)

    names = {"CudaBackend": Idle, "resolve": resolve}
    before = {name: getattr(cuda, name) for name in names}
    for name, value in names.items():
        setattr(cuda, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(cuda, name, value)


def torchs(dataset: Any, num_workers: int, device: str | None) -> Any:
    """Return torch's loader."""
    from torch.utils.data import DataLoader

    return DataLoader(dataset, BATCH, num_workers=num_workers, pin_memory=device is not None)


def _moved(batch: Any) -> Any:
    return [each.to("cuda", non_blocking=True) for each in batch]


def _settle(device: str | None) -> None:
    """Return when the next batch has arrived."""
    import torch

    if device == "cuda":
        torch.cuda.synchronize()
    time.sleep(_STEP_SECONDS)


def measure(contender: Contender, settings: dict[str, Any]) -> dict[str, float]:
    """Measure one pass."""
    import threading

    dataset = Pictures(BATCH * (settings["batches"] + WARM_UP))
    loader = contender.run(dataset, settings["num_workers"], **contender.arguments)
    device = contender.arguments["device"]
    Idle.made_by.clear()
    with _idle_device() if device == "idle" else contextlib.nullcontext():
        batches = iter(loader)
    move = _moved if device == "cuda" and contender.run is torchs else None
    took = hand_overs(batches, settings["batches"], partial(_settle, device), move)
    totals = [each.total_us for each in took]
    return {
        "receiving_us": statistics.median(each.receiving_us for each in took),
        "asking_us": statistics.median(each.asking_us for each in took),
        "median_us": statistics.median(totals),
        "least_us": statistics.quantiles(totals, n=10)[0],
        "allocations": Idle.made_by.count(threading.get_ident()),
    }


def _ours(name: str, isolation: str, device: str | None, **more: Any) -> Contender:
    arguments = {"isolation": isolation, "device": device}
    return Contender(f"ours, {name}", ours, arguments=arguments, **more)


TABLES = (
    Table(
        name="hand-over",
        title=f"The thread that trains, for each batch of {BATCH} small pictures",
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
    ),
)
