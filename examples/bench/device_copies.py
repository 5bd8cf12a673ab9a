"""Ways to get batches from host memory to the GPU: ours, SPDL's, and those of handwritten loops.

A way takes an iterator of batches on the host and returns one of batches on the device.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from typing import TYPE_CHECKING, Any

import torch

from .peers import imported

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Batch = dict[str, torch.Tensor]
    Way = Callable[[Iterator[Batch]], Iterator[Batch]]


WARM_UP = 3
"""Batches before the clock starts, while memory is allocated and kernels are loaded."""


def make_batch(num_pictures: int, pixels: int) -> Batch:
    """Return uint8 pictures, shape (N, 3, pixels, pixels), and their int64 labels; the same ones
    every time."""
    generator = torch.Generator().manual_seed(0)
    shape = (num_pictures, 3, pixels, pixels)
    return {
        "image": torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator),
        "label": torch.arange(num_pictures),
    }


def seconds_of(way: Way, batch: Batch, num_batches: int) -> float:
    """Return the seconds for ``num_batches`` copies of the batch, each read by a kernel.

    Raises: RuntimeError: a copy is missing, or holds something else.
    """
    go = threading.Event()
    arrived = way(held_back(batch, num_batches, go))
    total = torch.zeros((), dtype=torch.int64, device="cuda")
    for each in itertools.islice(arrived, WARM_UP):
        total += _ends(each)
    torch.cuda.synchronize()
    start = time.perf_counter()
    go.set()
    for each in arrived:
        total += _ends(each)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    expected, found = (WARM_UP + num_batches) * int(_ends(batch)), int(total)
    if found != expected:
        raise RuntimeError(f"batches arrived with other contents: sum {found}, expected {expected}")
    return seconds


def _ends(batch: Batch) -> torch.Tensor:
    """Return the first pixel plus the last label, which is above 0."""
    return batch["image"][0, 0, 0, 0] + batch["label"][-1]


def held_back(batch: Batch, num_batches: int, go: threading.Event) -> Iterator[Batch]:
    """Yield the same batch again and again; those that count only once ``go`` is set, so that no
    thread has started on one of them before the clock starts."""
    yield from itertools.repeat(batch, WARM_UP)
    go.wait()
    yield from itertools.repeat(batch, num_batches)


def copy_alone(batch: Batch, num_batches: int) -> float:
    """Return the seconds for copies from one pinned buffer to one buffer on the device, on a stream
    that does nothing else: what the link can do."""
    source = {key: tensor.pin_memory() for key, tensor in batch.items()}
    target = {key: tensor.to("cuda") for key, tensor in batch.items()}
    torch.cuda.synchronize()
    start = 0.0
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]  # untyped in torch
        for number in range(WARM_UP + num_batches):
            if number == WARM_UP:
                torch.cuda.synchronize()
                start = time.perf_counter()
            for key, tensor in source.items():
                target[key].copy_(tensor, non_blocking=True)
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _staged(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Stage on a thread and receive here, as ``DataLoader(device=)`` does."""
    from spdl_torch.io import Transfer

    for staged in on_a_thread(Transfer("cuda").stage, batches):
        yield staged.receive()


def _staged_pinned(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Do the same with batches that are pinned beforehand, which need no packing."""
    first = next(batches)
    pinned = {key: tensor.pin_memory() for key, tensor in first.items()}
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


WAYS: dict[str, Way] = {
    "ours, pinned": _staged_pinned,
    "ours": _staged,
    "SPDL": _with_spdl,
    "pin and copy": _pin_and_copy,
    "plain": _plain,
}


def on_a_thread(function: Callable[[Any], Any], items: Iterator[Any]) -> Iterator[Any]:
    """Yield ``map(function, items)``, computed on a thread at most two results ahead."""
    results: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue(2)

    def work() -> None:
        try:
            for item in items:
                results.put((function(item), None))
            results.put((None, StopIteration()))
        except BaseException as error:
            results.put((None, error))

    threading.Thread(target=work, name="bench-transfer", daemon=True).start()
    while True:
        result, error = results.get()
        if isinstance(error, StopIteration):
            return
        if error is not None:
            raise error
        yield result
