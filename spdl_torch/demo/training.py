"""The training script that is measured: augmented images, a light network, SGD, nothing unusual."""

from __future__ import annotations

import pkgutil
import platform
import random
import time
from collections.abc import Callable
from operator import ne
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, Subset
from torchvision import __version__ as torchvision_version, transforms
from torchvision.datasets import ImageFolder

from ..command_options import CommandError
from ..shown_text import counted

_POOL = 2000
"""The most different photographs that are read."""


class Amount(NamedTuple):
    """What a pass over the photographs does."""

    crop_pixels: int
    batch_size: int
    images_per_worker: int


_AMOUNT = Amount(128, 16, 320)
"""About half a second of torch's loader on each core."""
_SMOKE = Amount(64, 16, 32)
_ON_A_GPU = Amount(224, 64, 1280)


class Measurement(NamedTuple):
    """What one turn has measured."""

    loading_images_per_second: float
    """The most that the loader delivers: a model that takes more waits for it."""
    training_images_per_second: float
    wait_ratio: float
    """The share of the training's time that it waited for batches."""
    first_batch_seconds: float
    """From ``iter()`` to the first batch, in a fresh process."""


class Job(NamedTuple):
    """Load alone, then train, with the loader and the folder of images that a variant imports."""

    imports: tuple[str, str]
    folder: str
    num_workers: int
    smoke: bool
    times: int = 1
    """How many times the usual amount."""

    @property
    def amount(self) -> Amount:
        """What each pass does."""
        if self.smoke:
            return _SMOKE
        return _ON_A_GPU if torch.cuda.is_available() else _AMOUNT

    @property
    def num_images(self) -> int:
        """The number of images of each pass: several batches that are not the workers' first."""
        _, size, per_worker = self.amount
        return self.times * max(per_worker, 3 * size) * self.num_workers


def _chosen(num_files: int, num_images: int) -> list[int]:
    """Return the indices of that many images, spread evenly over the folder, perhaps repeated."""
    pool = min(num_files, num_images, _POOL)
    return [number % pool * num_files // pool for number in range(num_images)]


def make_loader(job: Job) -> tuple[Any, int]:
    """Return the loader as the variant's program makes it, and the number of classes."""
    crop_pixels, batch_size, _ = job.amount
    loader_class, folder_class = map(pkgutil.resolve_name, job.imports)
    augmentation = transforms.Compose(
        [
            transforms.RandomResizedCrop(crop_pixels),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )
    files = folder_class(job.folder, augmentation)
    loader = loader_class(
        Subset(files, _chosen(len(files), job.num_images)),
        batch_size,
        shuffle=True,
        num_workers=job.num_workers,
        pin_memory=torch.cuda.is_available(),
    )
    return loader, len(files.classes)


def check_folder(folder: Path) -> None:
    """Refuse what is not a class-per-folder tree of images. Raises: CommandError."""
    try:
        ImageFolder(folder)
    except OSError as error:
        expected = "--data must be a folder with one folder of images per class (class/photo.jpg)"
        remedy = "Leave --data out to use generated photographs."
        raise CommandError(f"{expected}: {error}. {remedy}") from error


def describe(folder: str) -> str:
    """Read the images to be measured, so that every turn finds them in memory; return what they
    are, and what the machine is.
    """
    files = ImageFolder(folder)
    paths = [files.samples[place][0] for place in _chosen(len(files), _POOL)]
    size = sum(len(Path(path).read_bytes()) for path in paths) / len(paths)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return (
        f"{len(files)} images ({size / 1000:.0f} kB each, {len(files.classes)} classes) of {folder}"
        f"\npython {platform.python_version()}, torch {torch.__version__}, torchvision "
        f"{torchvision_version}, {device}"
    )


def measure(job: Job) -> Measurement:
    """Load once without a model, then train; call it in a fresh process."""
    _start()
    loader, num_classes = make_loader(job)
    alone, _, first_batch_seconds = _pass_over(loader, lambda images, labels: None)
    _start()
    loader, _ = make_loader(job)
    trained, wait_ratio, _ = _pass_over(loader, _make_step(num_classes, job.amount))
    return Measurement(alone, trained, wait_ratio, first_batch_seconds)


def report_of(job: Job) -> str:
    """Train on one of our loaders; return the report on it."""
    _start()
    loader, num_classes = make_loader(job)
    _pass_over(loader, _make_step(num_classes, job.amount))
    return str(loader.report())


def _start() -> None:
    """Seed what draws, and leave the cores to the workers: several intra-op threads spin while they
    wait for each other."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)


def _make_step(num_classes: int, amount: Amount) -> Callable[[Any, Any], object]:
    """Return the training step of a network that takes 20,000 images of 128 x 128 pixels a second
    on one core: whichever loader feeds it, it waits.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    network = nn.Sequential(
        nn.Conv2d(3, 32, kernel_size=8, stride=8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, num_classes),
    ).to(device)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)

    def step(images: torch.Tensor, labels: torch.Tensor) -> float:
        images = images.to(device, non_blocking=True)
        loss = cross_entropy(network(images), labels.to(device, non_blocking=True))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # untyped in torch
        optimizer.step()
        return loss.item()  # waits for the device, so that the wait for data is only that

    size = amount.crop_pixels
    step(torch.zeros(2, 3, size, size), torch.zeros(2).long())  # sets up a GPU
    return step


def _pass_over(loader: Any, step: Callable[[Any, Any], object]) -> tuple[float, float, float]:
    """Return the images a second, the share of the time that the loop waited, and the seconds until
    the first batch.

    The first batch of each worker is not counted: until then it depends on how far apart they
    started.
    """
    num_images, waited, first_batch_seconds = 0, 0.0, 0.0
    counted_from = asked = begun = time.perf_counter()
    for number, (images, labels) in enumerate(loader):
        now = time.perf_counter()
        first_batch_seconds = first_batch_seconds or now - begun
        waited, num_images = waited + now - asked, num_images + len(images)
        step(images, labels)
        asked = time.perf_counter()
        if number + 1 == loader.num_workers:
            num_images, waited, counted_from = 0, 0.0, asked
    seconds = asked - counted_from
    return num_images / seconds, waited / seconds, first_batch_seconds


class _Filled(Dataset[torch.Tensor]):
    """Sample ``k`` is a megabyte of bytes that are ``k`` modulo 251."""

    thread_safe = True

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((1 << 20,), index % 251, dtype=torch.uint8)


def check_gpu(num_workers: int) -> str:
    """Check that batches arrive whole on a GPU, where late kernels read them long after the loop
    has dropped them and the loader has moved on; return a line for each kind of workers, "" if
    there is no GPU.
    """
    if not torch.cuda.is_available():
        return ""
    from ..loader.dataloader import DataLoader

    data, lines = _Filled(), list[str]()
    expected = [sum(index % 251 << 20 for index in range(n, n + 4)) for n in range(0, len(data), 4)]
    for isolation in ("thread", "process"):
        workers: dict[str, Any] = {"num_workers": num_workers, "isolation": isolation}
        sums = []
        for batch in DataLoader(data, batch_size=4, device="cuda", **workers):
            torch.cuda._sleep(4_000_000)  # type: ignore[no-untyped-call]  # some 2 ms
            sums.append(batch.sum(dtype=torch.int64))
            del batch
        wrong = sum(map(ne, torch.stack(sums).tolist(), expected)) + len(expected) - len(sums)
        found = "all whole" if not wrong else f"{wrong} WRONG: leave device= out on this machine"
        who = counted(num_workers, isolation)
        lines.append(f"{who}, {len(expected)} batches to the GPU: {found}")
    return "\n".join(lines)
