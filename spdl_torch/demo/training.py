"""The training script that is measured: resnet18, augmented photographs, SGD, nothing unusual."""

from __future__ import annotations

import pkgutil
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import Subset
from torchvision.models import resnet18
from torchvision.transforms import (
    Compose,
    Normalize,
    RandomHorizontalFlip,
    RandomResizedCrop,
    ToTensor,
)

from ..measuring.machine import OtherPrograms, cpu_seconds
from .jobs import POOL, VARIANTS, Measure, Measurement, StageRow, spread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["measure"]


class Progress(Protocol):
    """Told what is being done and how far it is."""

    def phase(self, name: str, total: int) -> None:
        """Begin a part of ``total`` images."""

    def done(self, count: int) -> None:
        """``count`` images of the part are behind us."""


def measure(job: Measure, progress: Progress) -> Measurement:
    """Load once without a model, then train; call it in a fresh process."""
    variant = VARIANTS[job.variant]
    loader_class = pkgutil.resolve_name(variant.loader)
    folder = pkgutil.resolve_name(variant.folder)(job.folder, _augmentation(job.plan.crop_pixels))
    plan = job.plan

    def make_loader(num_images: int) -> Any:
        pool = spread(len(folder), min(POOL, len(folder)))
        whole = num_images == len(folder)
        chosen = range(num_images) if whole else [pool[i] for i in spread(len(pool), num_images)]
        return loader_class(
            Subset(folder, chosen),
            batch_size=plan.batch_size,
            shuffle=True,
            num_workers=job.num_workers,
            pin_memory=job.device == "cuda",
        )

    others = OtherPrograms()
    _seed(job.seed)
    progress.phase("loading", plan.loading_images)
    loading = _load(make_loader(plan.loading_images), progress)
    _seed(job.seed)
    model = resnet18(num_classes=len(folder.classes)).to(job.device)
    loader = make_loader(plan.epoch_images)
    progress.phase("training", plan.epoch_images * plan.epochs)
    training = _train(model, loader, job, progress)
    return Measurement(
        loading_images_per_second=loading.images_per_second,
        first_batch_seconds=loading.first_batch_seconds,
        loading_cpu_seconds=loading.cpu_seconds / plan.loading_images,
        training_images_per_second=training.num_images / training.seconds,
        wait_ratio=training.wait_seconds / training.seconds,
        training_cpu_seconds=training.cpu_seconds / training.num_images,
        loss=training.loss,
        other_cores=others.cores(),
        stages=_read_stages(loader),
    )


def _augmentation(crop_pixels: int) -> Compose:
    return Compose(
        [
            RandomResizedCrop(crop_pixels),
            RandomHorizontalFlip(),
            ToTensor(),
            Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Loading:
    images_per_second: float
    first_batch_seconds: float
    cpu_seconds: float


def _load(loader: Any, progress: Progress) -> _Loading:
    cpu = cpu_seconds()
    start = time.perf_counter()
    num_images = num_first = 0
    first = start
    for images, _ in loader:
        if not num_first:
            first, num_first = time.perf_counter(), len(images)
        num_images += len(images)
        progress.done(num_images)
    seconds = time.perf_counter() - first
    return _Loading(
        images_per_second=(num_images - num_first) / seconds,
        first_batch_seconds=first - start,
        cpu_seconds=cpu_seconds() - cpu,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Training:
    num_images: int
    seconds: float
    wait_seconds: float
    cpu_seconds: float
    loss: float


def _train(model: torch.nn.Module, loader: Any, job: Measure, progress: Progress) -> _Training:
    step = _make_step(model, job)
    size = job.plan.crop_pixels
    # The first step sets up the kernels; it is not the loader's and not a typical one.
    step(torch.zeros(job.plan.batch_size, 3, size, size), torch.zeros(job.plan.batch_size).long())
    cpu, start = cpu_seconds(), time.perf_counter()
    wait_seconds, num_images, loss = 0.0, 0, float("nan")
    for _ in range(job.plan.epochs):
        for waited, (images, labels) in _timed(loader):
            wait_seconds += waited
            loss = step(images, labels)
            num_images += len(images)
            progress.done(num_images)
    return _Training(
        num_images=num_images,
        seconds=time.perf_counter() - start,
        wait_seconds=wait_seconds,
        cpu_seconds=cpu_seconds() - cpu,
        loss=loss,
    )


def _make_step(model: torch.nn.Module, job: Measure) -> Callable[[Any, Any], float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    model.train()

    def step(images: torch.Tensor, labels: torch.Tensor) -> float:
        images = images.to(job.device, non_blocking=True)
        labels = labels.to(job.device, non_blocking=True)
        loss = cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.item()  # waits for the device, so that the wait for data is only that

    return step


def _timed(loader: Any) -> Iterator[tuple[float, Any]]:
    """Each batch with the seconds that the caller waited for it, ``iter()`` included."""
    asked = time.perf_counter()
    for batch in loader:
        yield time.perf_counter() - asked, batch
        asked = time.perf_counter()


def _read_stages(loader: Any) -> tuple[StageRow, ...]:
    """Return what our loader measured about itself; nothing for torch's."""
    if not hasattr(loader, "snapshot"):
        return ()
    return tuple(
        StageRow(
            name=stage.name,
            concurrency=stage.concurrency,
            num_calls=stage.tasks.num_tasks,
            busy_ratio=stage.busy_ratio,
            cpu_ratio=stage.cpu_ratio,
            wait_in_ratio=stage.wait_in_ratio,
            wait_out_ratio=stage.wait_out_ratio,
            mean_seconds=stage.tasks.ave_time,
            p99_seconds=stage.tasks.p99_time,
            calls_per_second=stage.tasks.num_tasks / max(stage.tasks.elapsed, 1e-9),
            capacity_per_second=stage.capacity,
        )
        for stage in loader.snapshot().stages
    )
