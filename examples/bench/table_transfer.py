"""``transfer``: how fast batches get from ordinary memory to the GPU, beside a bare pinned copy.

The same batch, 256 uint8 pictures of 224 x 224 with their labels (38.5 MB), goes to the device
again and again, and a short kernel reads each copy. None is started before the clock starts, and
the device has nothing left to do when it stops. ``pinned copy`` copies from one pinned buffer to
one on the device, on a stream of its own, and nothing reads it: what the link can do. The other
rows are ways: a way takes an iterator of batches on the host and returns one of batches on the
device.

What loading costs a training run on the GPU is measured by ``step``.
"""

from __future__ import annotations

import itertools
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from spdl_torch.io import Transfer
from spdl_torch.pipeline import PipelineBuilder

from .peers import imported
from .report import Goal, Metric
from .tables import Contender, Table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from .tables import BenchOptions

    Batch = dict[str, torch.Tensor]
    Way = Callable[[Iterator[Batch]], Iterator[Batch]]

_BATCH = 256
_PIXELS = 224
_BATCHES_A_SECOND = 100
"""Copies for each of ``--seconds``: about what a loop without pinned memory makes."""
_LINK = "pinned copy"
_WARM_UP = 3
"""Batches before the clock starts, while memory is allocated and kernels are loaded."""


def _prepare(options: BenchOptions, folder: Path) -> dict[str, Any]:
    if not torch.cuda.is_available():
        raise ValueError(
            "transfer measures copies to a GPU, and torch finds no CUDA device here "
            "(torch.cuda.is_available() is False)."
        )
    return {
        "device": torch.cuda.get_device_name(),
        "batches": 4 if options.smoke else max(30, round(_BATCHES_A_SECOND * options.seconds)),
        "batch_size": 8 if options.smoke else _BATCH,
    }


def measure(contender: Contender, settings: dict[str, Any]) -> dict[str, float]:
    """Measure one way, or the link alone."""
    batch, num_batches = make_batch(settings["batch_size"], _PIXELS), settings["batches"]
    seconds = contender.run(batch, num_batches)
    num_bytes = sum(tensor.nbytes for tensor in batch.values())
    return {"gigabytes_per_second": num_batches * num_bytes / seconds / 1e9}


def make_batch(num_pictures: int, pixels: int) -> Batch:
    """Return uint8 pictures, shape (N, 3, pixels, pixels), and their int64 labels; the same ones
    every time."""
    generator = torch.Generator().manual_seed(0)
    shape = (num_pictures, 3, pixels, pixels)
    return {
        "image": torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator),
        "label": torch.arange(num_pictures),
    }


def copy_alone(batch: Batch, num_batches: int) -> float:
    """Return the seconds for copies from one pinned buffer to one buffer on the device, on a stream
    that does nothing else: what the link can do."""
    source = {key: tensor.pin_memory() for key, tensor in batch.items()}
    target = {key: tensor.to("cuda") for key, tensor in batch.items()}
    torch.cuda.synchronize()
    start = 0.0
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]  # untyped in torch
        for number in range(_WARM_UP + num_batches):
            if number == _WARM_UP:
                torch.cuda.synchronize()
                start = time.perf_counter()
            for key, tensor in source.items():
                target[key].copy_(tensor, non_blocking=True)
        torch.cuda.synchronize()
    return time.perf_counter() - start


def seconds_of(batch: Batch, num_batches: int, *, way: Way) -> float:
    """Return the seconds for ``num_batches`` copies of the batch, each read by a kernel.

    Raises: RuntimeError: a copy is missing, or holds something else.
    """
    go = threading.Event()
    arrived = way(_held_back(batch, num_batches, go))
    total = torch.zeros((), dtype=torch.int64, device="cuda")
    for each in itertools.islice(arrived, _WARM_UP):
        total += _ends(each)
    torch.cuda.synchronize()
    start = time.perf_counter()
    go.set()
    for each in arrived:
        total += _ends(each)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    expected, found = (_WARM_UP + num_batches) * int(_ends(batch)), int(total)
    if found != expected:
        raise RuntimeError(f"batches arrived with other contents: sum {found}, expected {expected}")
    return seconds


def _ends(batch: Batch) -> torch.Tensor:
    """Return the first pixel plus the last label, which is above 0."""
    return batch["image"][0, 0, 0, 0] + batch["label"][-1]


def _held_back(batch: Batch, num_batches: int, go: threading.Event) -> Iterator[Batch]:
    """Yield the same batch again and again; those that count only once ``go`` is set, so that no
    thread has started on one of them before the clock starts."""
    yield from itertools.repeat(batch, _WARM_UP)
    go.wait()
    yield from itertools.repeat(batch, num_batches)


def _staged(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Stage on a thread and receive here, as ``DataLoader(device=)`` does."""
    for staged in on_a_thread(Transfer("cuda").stage, batches):
        yield staged.receive()


def _staged_pinned(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Do the same with batches that are pinned beforehand, which need no packing."""
    pinned = {key: tensor.pin_memory() for key, tensor in next(batches).items()}
    return _staged(itertools.chain([pinned], (pinned for _ in batches)))


def _with_spdl(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Use SPDL's function on one thread, as its documentation asks."""
    return on_a_thread(imported("spdl.io").transfer_tensor_h2d, batches)


def _pin_and_copy(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Pin, then copy, as torch's DataLoader with ``pin_memory=True`` and the usual loop do."""
    for batch in batches:
        pinned = {key: tensor.pin_memory() for key, tensor in batch.items()}
        yield {key: tensor.to("cuda", non_blocking=True) for key, tensor in pinned.items()}


def _plain(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Copy as a script without ``pin_memory`` does."""
    for batch in batches:
        yield {key: tensor.to("cuda") for key, tensor in batch.items()}


def on_a_thread(function: Callable[[Any], Any], items: Iterator[Any]) -> Iterator[Any]:
    """Yield ``map(function, items)``, computed on a thread at most two results ahead."""
    builder = PipelineBuilder().add_source(items).pipe(function).add_sink(2)
    with builder.build(max_failures=0).auto_stop() as pipeline:
        yield from pipeline


def _way(name: str, way: Way, *needs: str) -> Contender:
    return Contender(name, partial(seconds_of, way=way), needs, smoke=not needs)


_goal = partial(Goal, "gigabytes_per_second")
TABLE = Table(
    name="transfer",
    title=f"Batches of {_BATCH} pictures to the GPU",
    metrics=(Metric("gigabytes_per_second", "GB/s", 2),),
    contenders=(
        Contender(_LINK, copy_alone, smoke=True),
        _way("ours, pinned", _staged_pinned),
        _way("ours", _staged),
        _way("SPDL", _with_spdl, "spdl"),
        _way("pin and copy", _pin_and_copy),
        _way("plain", _plain),
    ),
    prepare=_prepare,
    measure=measure,
    peer=_LINK,
    goals=(
        _goal("ours, pinned", _LINK, at_least=0.95),
        _goal("ours", _LINK),
        _goal("ours", "SPDL"),
        _goal("ours", "pin and copy"),
        _goal("ours", "plain"),
    ),
)
