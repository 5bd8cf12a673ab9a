"""The way to the GPU: how fast batches get there, and what real photographs cost a training.

Needs a CUDA device; without one it says what it would measure, and ends.

*Copying.* Batches of 256 uint8 pictures of 224 x 224 with their labels (38.5 MB) go from ordinary
memory to the device, again and again, and a short kernel reads each. GB/s:

- pinned copy: one pinned buffer, copied with ``non_blocking=True``; what the link can do;
- ours: ``spdl_torch.io.Transfer``, ``stage`` on a thread of its own, ``receive`` on this one;
- ours, pinned: the same with batches that are pinned already, which need no packing;
- SPDL: its ``transfer_tensor_h2d``, on a thread of its own;
- pin and copy: ``pin_memory()``, then ``.to(non_blocking=True)``, for every tensor;
- plain: ``.to("cuda")`` from ordinary memory.

*Training.* ResNet-50, bfloat16, channels_last, batches of 128. Images/s:

- synthetic: one batch that is on the device already; what the model can do;
- ours: photographs through ``DataLoader(ImageFolder(...), device="cuda")``, as many threads as
  there are cores; pictures arrive as bytes and are scaled on the device;
- torch: the same model fed by torch's DataLoader and torchvision's ImageFolder, as many processes,
  ``pin_memory=True``.

Rounds are interleaved; figures are medians with their spread. Goals: pinned batches at 0.9 of the
pinned copy; training with photographs at 0.95 of synthetic, where there are cores enough (a core
decodes 600 images/s). What is not pinned is packed by one core, whose memory is slower than a
fast link.

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

PIXELS = 224
COPY_BATCH = 256
TRAIN_BATCH = 128
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
    """Measure every row, or say what they are."""
    rows = [row for row in [*COPIES, *TRAININGS] if row != SPDL or installed("spdl")]
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
    num_batches = 4 if options.smoke else 100
    with photographs(options.data, 16 if options.smoke else 1000) as folder:
        one = partial(measure, folder=folder, num_batches=num_batches, workers=options.workers)
        interleaved(report, rows, options.rounds, one)
    copies = partial(Goal, metric="gigabytes_per_second", row=OURS)
    trains = partial(Goal, metric="images_per_second", row=TRAIN_OURS)
    report.goals = [
        copies(row=OURS_PINNED, over=PINNED_COPY, at_least=0.9),
        copies(over=PINNED_COPY),
        *(copies(over=row) for row in rows[rows.index(OURS_PINNED) + 1 :] if row in COPIES),
        trains(over=TRAIN_SYNTHETIC, at_least=0.95),
        trains(over=TRAIN_TORCH),
    ]
    return report


def measure(row: str, folder: Path, num_batches: int, workers: int) -> dict[str, float]:
    """One row in this process."""
    if row in TRAININGS:
        batches = TRAININGS[row](folder, num_batches + WARM_UP, workers)
        seconds = train(batches, num_batches)
        return {"images_per_second": num_batches * TRAIN_BATCH / seconds}
    images = torch.randint(0, 256, (COPY_BATCH, 3, PIXELS, PIXELS), dtype=torch.uint8)
    batch = {"image": images, "label": torch.arange(COPY_BATCH)}
    arrived = COPIES[row](itertools.repeat(batch, num_batches + WARM_UP))
    seconds = read_each(arrived, num_batches)
    num_bytes = sum(tensor.nbytes for tensor in batch.values())
    return {"gigabytes_per_second": num_batches * num_bytes / seconds / 1e9}


def read_each(batches: Iterator[Any], num_batches: int) -> float:
    """Seconds for all but the first batches, each of them read by a kernel."""
    total = torch.zeros((), dtype=torch.int64, device="cuda")
    start = 0.0
    for number, batch in enumerate(batches):
        if number == WARM_UP:
            torch.cuda.synchronize()
            start = time.perf_counter()
        total += batch["image"][0, 0, 0, 0] + batch["label"][0]
    torch.cuda.synchronize()
    assert number + 1 == num_batches + WARM_UP, number
    return time.perf_counter() - start


def train(batches: Iterator[Any], num_batches: int) -> float:
    """Seconds for all but the first steps."""
    from torchvision.models import resnet50

    model = resnet50().to("cuda", memory_format=torch.channels_last).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    mean = torch.tensor((123.7, 116.3, 103.5), device="cuda").view(1, 3, 1, 1)
    start = 0.0
    for number, (images, labels) in enumerate(batches):
        if number == WARM_UP:
            torch.cuda.synchronize()
            start = time.perf_counter()
        inputs = images.float().sub_(mean).div_(58).contiguous(memory_format=torch.channels_last)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch.cuda.synchronize()
    assert number + 1 == num_batches + WARM_UP, number
    return time.perf_counter() - start


# Copying: host batches in, device batches out.


def pinned_copy(batches: Iterator[Any]) -> Iterator[Any]:
    """Always the same pinned memory, always to the same place."""
    source: dict[str, Any] = {}
    target: dict[str, Any] = {}
    for batch in batches:
        if not source:
            source = {key: tensor.pin_memory() for key, tensor in batch.items()}
            target = {key: tensor.to("cuda") for key, tensor in batch.items()}
        for key, tensor in source.items():
            target[key].copy_(tensor, non_blocking=True)
        yield target


def ours(batches: Iterator[Any]) -> Iterator[Any]:
    """Staged on a thread, received here: what ``DataLoader(device=)`` does."""
    from spdl_torch.io import Transfer

    for staged in on_a_thread(Transfer("cuda").stage, batches):
        yield staged.receive()


def ours_pinned(batches: Iterator[Any]) -> Iterator[Any]:
    """From batches that were pinned beforehand."""
    first = next(batches)
    pinned = {key: tensor.pin_memory() for key, tensor in first.items()}
    return ours(itertools.chain([pinned], (pinned for _ in batches)))


def with_spdl(batches: Iterator[Any]) -> Iterator[Any]:
    """SPDL's function, on one thread, as its documentation asks."""
    import spdl.io

    return on_a_thread(spdl.io.transfer_tensor_h2d, batches)


def pin_and_copy(batches: Iterator[Any]) -> Iterator[Any]:
    """As torch's DataLoader with ``pin_memory=True`` and the usual loop do."""
    for batch in batches:
        pinned = {key: tensor.pin_memory() for key, tensor in batch.items()}
        yield {key: tensor.to("cuda", non_blocking=True) for key, tensor in pinned.items()}


def plain(batches: Iterator[Any]) -> Iterator[Any]:
    """As a script without ``pin_memory``."""
    for batch in batches:
        yield {key: tensor.to("cuda") for key, tensor in batch.items()}


def on_a_thread(function: Callable[[Any], Any], items: Iterator[Any]) -> Iterator[Any]:
    """``map(function, items)``, at most two results ahead."""
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
    """One batch that is there already."""
    images = torch.randint(0, 256, (TRAIN_BATCH, 3, PIXELS, PIXELS), dtype=torch.uint8)
    return itertools.repeat((images.to("cuda"), torch.arange(TRAIN_BATCH, device="cuda")), count)


def with_our_loader(folder: Path, count: int, workers: int) -> Iterator[Any]:
    """Batches arrive on the device."""
    from spdl_torch import DataLoader, ImageFolder

    dataset = ImageFolder(folder, augmentation())
    return iter(make_loader(DataLoader, dataset, count, workers, device="cuda"))


def with_torchs_loader(folder: Path, count: int, workers: int) -> Iterator[Any]:
    """The loop moves them."""
    from torchvision.datasets import ImageFolder

    dataset = ImageFolder(folder, augmentation())
    loader = make_loader(torch.utils.data.DataLoader, dataset, count, workers, pin_memory=True)
    for batch in loader:
        yield tuple(tensor.to("cuda", non_blocking=True) for tensor in batch)


def augmentation() -> Any:
    """ImageNet's, to bytes."""
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
    """``count`` batches, over the folder's pictures again and again."""
    indices = [index % len(dataset) for index in range(count * TRAIN_BATCH)]
    return loader_class(
        torch.utils.data.Subset(dataset, indices),
        batch_size=TRAIN_BATCH,
        shuffle=True,
        num_workers=workers,
        **options,
    )


COPIES: dict[str, Callable[[Iterator[Any]], Iterator[Any]]] = {
    PINNED_COPY: pinned_copy,
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
    """The benchmarks' options and the number of workers."""
    from spdl_torch.measuring.machine import usable_cores

    made = argument_parser(__doc__ or "", rounds=5)
    made.add_argument(
        "--workers", type=int, default=usable_cores(), help="of loaders (default: %(default)s)"
    )
    return made


if __name__ == "__main__":
    run_program(main, parser())
