"""The training script that is measured: two networks, augmented images, SGD, nothing unusual."""

from __future__ import annotations

import pkgutil
import random
import time
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import nn
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

from ..machine.cpu_time import OtherPrograms, cpu_seconds
from ..named_tuples import NamedTuple
from .jobs import (
    PICTURES,
    POOL,
    REPORT_TIMES,
    VARIANTS,
    Measure,
    Measurement,
    Training,
    spread,
)
from .pictures import Pictures
from .verdict import seen_by_training

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .jobs import Amount


class Progress(Protocol):
    """Called with what is being done and how far it is."""

    def phase(self, name: str, total: int) -> None:
        """Begin a part of ``total`` images."""

    def done(self, count: int) -> None:
        """Report that ``count`` images of the part are done."""


def measure(job: Measure, progress: Progress) -> Measurement:
    """Load once without a model, then train both networks; call it in a fresh process."""
    plan = job.plan
    others = OtherPrograms()
    _seed(job.seed)
    progress.phase("loading", plan.loading_images)
    amount = plan.loading_images, plan.crop_pixels, plan.batch_size
    loading = _load(_make_loader(job, *amount), progress)
    light, _ = _train(job, _make_light_network, "a light network", amount, progress)
    report = _report(job, progress) if job.reports else None
    amount = plan.resnet_images, plan.resnet_crop_pixels, plan.resnet_batch_size
    resnet, _ = _train(job, _make_resnet, "resnet18", amount, progress)
    return Measurement(
        loading_images_per_second=loading.images_per_second,
        first_batch_seconds=loading.first_batch_seconds,
        loading_cpu_seconds=loading.cpu_seconds / plan.loading_images,
        light=light,
        resnet=resnet,
        other_cores=others.cores(),
        report=report,
    )


def _make_loader(job: Measure, num_images: int, crop_pixels: int, batch_size: int) -> Any:
    return pkgutil.resolve_name(VARIANTS[job.variant].loader)(
        make_dataset(job.workload, job.variant, job.folder, num_images, crop_pixels),
        batch_size=batch_size,
        shuffle=True,
        num_workers=job.num_workers,
        pin_memory=job.device == "cuda",
    )


def make_dataset(
    workload: str, variant: str, folder: str, num_images: int, crop_pixels: int = 128
) -> Any:
    """Return ``num_images`` of a workload, as the variant's program loads them."""
    if workload == PICTURES:
        return Pictures(num_images)
    files = pkgutil.resolve_name(VARIANTS[variant].folder)(folder, _augmentation(crop_pixels))
    pool = spread(len(files), min(POOL, len(files)))
    whole = num_images == len(files)
    return Subset(
        files, range(num_images) if whole else [pool[i] for i in spread(len(pool), num_images)]
    )


def _make_light_network(num_classes: int) -> nn.Module:
    """Return a network that takes 20,000 images of 128 x 128 pixels a second on one core: whichever
    loader feeds it, it waits.
    """
    return nn.Sequential(
        nn.Conv2d(3, 32, kernel_size=8, stride=8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, num_classes),
    )


def _make_resnet(num_classes: int) -> nn.Module:
    network: nn.Module = resnet18(num_classes=num_classes)
    return network


def resnet_seconds(amount: Amount, device: str) -> float:
    """Return how long resnet18 trains on one image, by itself."""
    network = _make_resnet(10).to(device)
    step = _make_step(network, device)
    size, pixels = amount.batch_size, amount.pixels
    images, labels = torch.zeros(size, 3, pixels, pixels), torch.zeros(size).long()
    step(images, labels)  # sets up its kernels
    seconds = []
    for _ in range(_PROBES):
        start = time.perf_counter()
        step(images, labels)
        seconds.append(time.perf_counter() - start)
    return median(seconds) / size


_PROBES = 3


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
    cpu, pace = cpu_seconds(), _Pace(_num_warm(loader))
    start = time.perf_counter()
    first_batch_seconds = 0.0
    for waited, (images, _) in _timed(loader):
        first_batch_seconds = first_batch_seconds or time.perf_counter() - start
        pace.count(len(images), waited)
        progress.done(pace.total)
    read = pace.read()
    return _Loading(
        images_per_second=read.num_images / read.seconds,
        first_batch_seconds=first_batch_seconds,
        cpu_seconds=cpu_seconds() - cpu,
    )


def _num_warm(loader: Any) -> int:
    """Return how many batches are not counted: until each worker has made one, it depends on how
    far apart they started."""
    num_workers: int = loader.num_workers
    return min(num_workers, len(loader) - 1)


def _train(
    job: Measure,
    make_network: Callable[[int], nn.Module],
    name: str,
    amount: tuple[int, int, int],
    progress: Progress,
) -> tuple[Training, Any]:
    """Train a new network on so many images of so many pixels in batches of such a size; return the
    measurements and the loader that fed it."""
    _seed(job.seed)
    num_images, size, _ = amount
    total = num_images * job.plan.epochs
    progress.phase(f"training {name}", total)
    loader = _make_loader(job, *amount)
    step = _make_step(make_network(_num_classes(loader.dataset)).to(job.device), job.device)
    step(torch.zeros(2, 3, size, size), torch.zeros(2).long())  # sets up a GPU
    cpu, clocks, done = cpu_seconds(), list[_Reading](), 0
    loss = float("nan")
    for _ in range(job.plan.epochs):
        clock = _Pace(_num_warm(loader))
        for waited, (images, labels) in _timed(loader):
            loss = step(images, labels)
            clock.count(len(images), waited)
            progress.done(done + clock.total)
        clocks.append(clock.read())
        done += clock.total
    seconds = sum(each.seconds for each in clocks)
    training = Training(
        images_per_second=sum(each.num_images for each in clocks) / seconds,
        epochs=tuple(each.num_images / each.seconds for each in clocks),
        wait_ratio=sum(each.wait_seconds for each in clocks) / seconds,
        cpu_seconds=(cpu_seconds() - cpu) / total,
        loss=loss,
    )
    return training, loader


class _Reading(NamedTuple):
    """The steps that count."""

    seconds: float
    wait_seconds: float
    num_images: int


class _Pace:
    """Counts an epoch from the end of its first ``num_warm`` steps to that of its last one: the
    first one sets up kernels for the batch's shape, they wait for the workers' start, and after the
    last one the workers end.
    """

    def __init__(self, num_warm: int, now: Callable[[], float] = time.perf_counter) -> None:
        self.total = 0
        self._now = now
        self._last = now()
        self._before = self._last, 0.0, 0
        self._wait_seconds = 0.0
        self._num_left = num_warm

    def count(self, num_images: int, waited: float) -> None:
        """Count a step that has ended."""
        self._last = self._now()
        self.total += num_images
        self._wait_seconds += waited
        if self._num_left:
            self._num_left -= 1
            self._before = self._last, self._wait_seconds, self.total

    def read(self) -> _Reading:
        """Return what was counted until now."""
        since, waited, images = self._before
        return _Reading(self._last - since, self._wait_seconds - waited, self.total - images)


def _num_classes(dataset: Any) -> int:
    return len(getattr(dataset, "dataset", dataset).classes)


def _make_step(model: torch.nn.Module, device: str) -> Callable[[Any, Any], float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    model.train()

    def step(images: torch.Tensor, labels: torch.Tensor) -> float:
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        loss = cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # untyped in torch
        optimizer.step()
        return loss.item()  # waits for the device, so that the wait for data is only that

    return step


def _timed(loader: Any) -> Iterator[tuple[float, Any]]:
    """Yield each batch with the seconds that the caller waited for it, ``iter()`` included."""
    asked = time.perf_counter()
    for batch in loader:
        yield time.perf_counter() - asked, batch
        asked = time.perf_counter()


def _report(job: Measure, progress: Progress) -> dict[str, Any] | None:
    """Train the light network for longer; return our loader's report on that, None for torch's."""
    plan = job.plan
    amount = REPORT_TIMES * plan.light_images, plan.crop_pixels, plan.batch_size
    training, loader = _train(job, _make_light_network, "it again, to report", amount, progress)
    if not hasattr(loader, "report"):
        return None
    return seen_by_training(loader.report(), training.wait_ratio).as_dict()
