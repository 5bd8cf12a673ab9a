"""The way to the GPU: how fast batches get there, and what real photographs cost a training.

Needs a CUDA device; without one it says what it would measure, and ends.

*Copying.* Batches of 256 uint8 pictures of 224 x 224 with their labels (38.5 MB) go from ordinary
memory to the device, again and again, and a short kernel reads each. No batch is begun before the
clock starts. GB/s:

- pinned copy: one pinned buffer, copied with ``non_blocking=True`` on a stream that does nothing
  else; what the link can do;
- ours: ``spdl_torch.io.Transfer``, ``stage`` on a thread of its own, ``receive`` on this one;
- ours, pinned: the same with batches that are pinned already, which need no packing;
- SPDL: its ``transfer_tensor_h2d``, on a thread of its own;
- pin and copy: ``pin_memory()``, then ``.to(non_blocking=True)``, for every tensor;
- plain: ``.to("cuda")`` from ordinary memory.

*Training.* ResNet-50, bfloat16, channels_last, batches of 256. What the loaders have ready when
the clock starts is thrown away before, and ten times as many batches are measured. Images/s:

- synthetic: one batch that is on the device already; what the model can do;
- ours: photographs through ``DataLoader(ImageFolder(...), device="cuda")``, as many threads as
  there are cores; pictures arrive as bytes and are scaled on the device;
- torch: the same model fed by torch's DataLoader and torchvision's ImageFolder, as many processes,
  ``pin_memory=True``.

Rounds are interleaved; figures are medians with their spread. Goals: pinned batches at 0.95 of the
pinned copy; training with photographs at 0.95 of synthetic, where there are cores enough (a core
decodes 600 images/s). What is not pinned is packed by up to four threads, whose memory is slower
than a fast link.

    python examples/transfer_benchmark.py [--data DIR] [--workers N] [--rounds N] [--json FILE]
        [--smoke]
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from _bench import (
    Goal,
    Metric,
    Report,
    argument_parser,
    installed,
    interleaved,
    left_out,
    machine,
    photographs,
    run_program,
)

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator
    from pathlib import Path

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PIXELS = 224
COPY_BATCH = 256
TRAIN_BATCH = 256
SMOKE_BATCHES = 4
WARM_UP = 3
"""Batches that are not measured: slabs are made, kernels are chosen."""
METRICS = (
    Metric(key="gigabytes_per_second", heading="GB/s", digits=2),
    Metric(key="images_per_second", heading="images/s"),
)
PINNED_COPY = "pinned copy"
OURS = "ours"
OURS_PINNED = "ours, pinned"
SPDL = "SPDL"
TRAIN_SYNTHETIC = "train: synthetic"
TRAIN_OURS = "train: ours"
TRAIN_TORCH = "train: torch"


def main(options: argparse.Namespace) -> Report:
    """Measure every row, or list them."""
    rows = [row for row in [PINNED_COPY, *COPIES, *TRAININGS] if row != SPDL or installed("spdl")]
    report = Report(
        title="Batches to the GPU",
        metrics=METRICS,
        settings=machine(workers=options.workers, rounds=options.rounds),
        remarks=[] if installed("spdl") else [left_out("spdl", SPDL)],
    )
    if not torch.cuda.is_available():
        report.remarks.append(
            "torch finds no CUDA device here, so nothing was measured. With one: " + "; ".join(rows)
        )
        return report
    report.settings = {**report.settings, "device": torch.cuda.get_device_name()}
    num_batches = SMOKE_BATCHES if options.smoke else 100
    with photographs(options.data, 16 if options.smoke else 1000) as folder:
        one = partial(measure, folder=folder, num_batches=num_batches, workers=options.workers)
        interleaved(report, rows, options.rounds, one)
    copies = partial(Goal, metric="gigabytes_per_second", row=OURS)
    trains = partial(Goal, metric="images_per_second", row=TRAIN_OURS)
    report.goals = [
        copies(row=OURS_PINNED, over=PINNED_COPY, at_least=0.95),
        copies(over=PINNED_COPY),
        *(copies(over=row) for row in rows[rows.index(OURS_PINNED) + 1 :] if row in COPIES),
        trains(over=TRAIN_SYNTHETIC, at_least=0.95),
        trains(over=TRAIN_TORCH),
    ]
    return report


def measure(row: str, folder: Path, num_batches: int, workers: int) -> dict[str, float]:
    """Measure one row in this process."""
    if row in TRAININGS:
        num_ready = 0 if row == TRAIN_SYNTHETIC else 2 * workers + 3
        num_batches = (
            max(num_batches, 10 * num_ready) if num_batches > SMOKE_BATCHES else num_batches
        )
        batches = TRAININGS[row](folder, WARM_UP + num_ready + num_batches, workers)
        seconds = train(batches, num_ready, num_batches)
        return {"images_per_second": num_batches * TRAIN_BATCH / seconds}
    images = torch.randint(0, 256, (COPY_BATCH, 3, PIXELS, PIXELS), dtype=torch.uint8)
    batch = {"image": images, "label": torch.arange(COPY_BATCH)}
    num_bytes = sum(tensor.nbytes for tensor in batch.values())
    if row == PINNED_COPY:
        seconds = copy_alone(batch, num_batches)
    else:
        go = threading.Event()
        arrived = COPIES[row](held_back(batch, num_batches, go))
        seconds = read_each(arrived, num_batches, go)
    return {"gigabytes_per_second": num_batches * num_bytes / seconds / 1e9}


def held_back(batch: Any, num_batches: int, go: threading.Event) -> Iterator[Any]:
    """Yield the same batch again and again; those that are measured, only once the clock runs."""
    yield from itertools.repeat(batch, WARM_UP)
    go.wait()
    yield from itertools.repeat(batch, num_batches)


def read_each(batches: Iterator[Any], num_batches: int, go: threading.Event) -> float:
    """Return the seconds for all but the first batches, each of them read by a kernel."""
    total = torch.zeros((), dtype=torch.int64, device="cuda")
    for batch in itertools.islice(batches, WARM_UP):
        total += batch["image"][0, 0, 0, 0] + batch["label"][0]
    torch.cuda.synchronize()
    start, number = time.perf_counter(), 0
    go.set()
    for batch in batches:
        number += 1
        total += batch["image"][0, 0, 0, 0] + batch["label"][0]
    torch.cuda.synchronize()
    assert number == num_batches, number
    return time.perf_counter() - start


def copy_alone(batch: dict[str, torch.Tensor], num_batches: int) -> float:
    """Return the seconds for copies from the same pinned memory to the same place, and no more."""
    source = {key: tensor.pin_memory() for key, tensor in batch.items()}
    target = {key: tensor.to("cuda") for key, tensor in batch.items()}
    torch.cuda.synchronize()
    start = 0.0
    with torch.cuda.stream(torch.cuda.Stream()):
        for number in range(WARM_UP + num_batches):
            if number == WARM_UP:
                torch.cuda.synchronize()
                start = time.perf_counter()
            for key, tensor in source.items():
                target[key].copy_(tensor, non_blocking=True)
        torch.cuda.synchronize()
    return time.perf_counter() - start


def train(batches: Iterator[Any], num_ready: int, num_batches: int) -> float:
    """Return the seconds for all steps but the first ones; ``num_ready`` batches are thrown away
    between."""
    from torchvision.models import resnet50

    from spdl_torch.nn import ToFloat

    model = resnet50().to("cuda", memory_format=torch.channels_last).train()
    to_float = ToFloat(MEAN, STD).to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(model(to_float(images)), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    for batch in itertools.islice(batches, WARM_UP):
        step(*batch)
    torch.cuda.synchronize()
    for _ in itertools.islice(batches, num_ready):
        pass
    start, number = time.perf_counter(), 0
    for batch in batches:
        number += 1
        step(*batch)
    torch.cuda.synchronize()
    assert number == num_batches, number
    return time.perf_counter() - start


# Copying: host batches in, device batches out.


def ours(batches: Iterator[Any]) -> Iterator[Any]:
    """Stage on a thread, receive here: what ``DataLoader(device=)`` does."""
    from spdl_torch.io import Transfer

    for staged in on_a_thread(Transfer("cuda").stage, batches):
        yield staged.receive()


def ours_pinned(batches: Iterator[Any]) -> Iterator[Any]:
    """Do the same from batches that were pinned beforehand."""
    first = next(batches)
    pinned = {key: tensor.pin_memory() for key, tensor in first.items()}
    return ours(itertools.chain([pinned], (pinned for _ in batches)))


def with_spdl(batches: Iterator[Any]) -> Iterator[Any]:
    """Use SPDL's function, on one thread, as its documentation asks."""
    import spdl.io

    return on_a_thread(spdl.io.transfer_tensor_h2d, batches)


def pin_and_copy(batches: Iterator[Any]) -> Iterator[Any]:
    """Pin and copy as torch's DataLoader with ``pin_memory=True`` and the usual loop do."""
    for batch in batches:
        pinned = {key: tensor.pin_memory() for key, tensor in batch.items()}
        yield {key: tensor.to("cuda", non_blocking=True) for key, tensor in pinned.items()}


def plain(batches: Iterator[Any]) -> Iterator[Any]:
    """Copy as a script without ``pin_memory`` does."""
    for batch in batches:
        yield {key: tensor.to("cuda") for key, tensor in batch.items()}


def on_a_thread(function: Callable[[Any], Any], items: Iterator[Any]) -> Iterator[Any]:
    """Yield ``map(function, items)``, made at most two results ahead."""
    results: queue.Queue[Any] = queue.Queue(2)

    def work() -> None:
        try:
            for item in items:
                results.put((function(item), None))
            results.put((None, StopIteration()))
        except BaseException as error:
            results.put((None, error))

    threading.Thread(target=work, daemon=True).start()
    while True:
        result, error = results.get()
        if isinstance(error, StopIteration):
            return
        if error is not None:
            raise error
        yield result


# Training: batches of images and labels on the device.


def synthetic(folder: Path, count: int, workers: int) -> Iterator[Any]:
    """Train on one batch that is there already."""
    images = torch.randint(0, 256, (TRAIN_BATCH, 3, PIXELS, PIXELS), dtype=torch.uint8)
    return itertools.repeat((images.to("cuda"), torch.arange(TRAIN_BATCH, device="cuda")), count)


def with_our_loader(folder: Path, count: int, workers: int) -> Iterator[Any]:
    """Train from our loader: batches arrive on the device."""
    from spdl_torch import DataLoader, ImageFolder

    dataset = ImageFolder(folder, augmentation())
    return iter(make_loader(DataLoader, dataset, count, workers, device="cuda"))


def with_torchs_loader(folder: Path, count: int, workers: int) -> Iterator[Any]:
    """Train from torch's loader: the loop moves the batches."""
    from torchvision.datasets import ImageFolder

    dataset = ImageFolder(folder, augmentation())
    loader = make_loader(torch.utils.data.DataLoader, dataset, count, workers, pin_memory=True)
    for batch in loader:
        yield tuple(tensor.to("cuda", non_blocking=True) for tensor in batch)


def augmentation() -> Any:
    """Return ImageNet's augmentation, to bytes."""
    from torchvision import transforms

    steps = (
        transforms.RandomResizedCrop(PIXELS),
        transforms.RandomHorizontalFlip(),
        transforms.PILToTensor(),
    )
    return transforms.Compose(steps)


def make_loader(
    loader_class: Any, dataset: Any, count: int, workers: int, **options: object
) -> Any:
    """Return a loader of ``count`` batches, over the folder's pictures again and again."""
    indices = [index % len(dataset) for index in range(count * TRAIN_BATCH)]
    return loader_class(
        torch.utils.data.Subset(dataset, indices),
        batch_size=TRAIN_BATCH,
        shuffle=True,
        num_workers=workers,
        **options,
    )


COPIES: dict[str, Callable[[Iterator[Any]], Iterator[Any]]] = {
    OURS: ours,
    OURS_PINNED: ours_pinned,
    SPDL: with_spdl,
    "pin and copy": pin_and_copy,
    "plain": plain,
}
TRAININGS: dict[str, Callable[[Path, int, int], Iterator[Any]]] = {
    TRAIN_SYNTHETIC: synthetic,
    TRAIN_OURS: with_our_loader,
    TRAIN_TORCH: with_torchs_loader,
}


def parser() -> argparse.ArgumentParser:
    """Return a parser of the benchmarks' options and the number of workers."""
    from spdl_torch.measuring.machine import usable_cores

    made = argument_parser(__doc__ or "", rounds=5)
    made.add_argument(
        "--workers", type=int, default=usable_cores(), help="of loaders (default: %(default)s)"
    )
    return made


if __name__ == "__main__":
    run_program(main, parser())
