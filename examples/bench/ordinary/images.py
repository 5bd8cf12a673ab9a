"""Small pictures in memory, through Pillow and torchvision's v1 transforms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset
from torchvision import transforms

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_PICTURES = 10_000
_MEAN, _STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


class CIFAR(Dataset[Any]):
    """uint8 pictures of 32 x 32 in one array."""

    def __init__(self, count: int, transform: Callable[[Any], Any]) -> None:
        generator = np.random.default_rng(0)
        self.data = generator.integers(0, 256, (min(count, _PICTURES), 32, 32, 3), dtype=np.uint8)
        self.targets = generator.integers(0, 10, len(self.data)).tolist()
        self.count = count
        self.transform = transform

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Any, int]:
        place = index % len(self.data)
        image, target = self.data[place], self.targets[place]
        return self.transform(Image.fromarray(image)), target


class MNIST(Dataset[Any]):
    """uint8 pictures of 28 x 28 in one tensor."""

    def __init__(self, count: int, transform: Callable[[Any], Any]) -> None:
        generator = torch.Generator().manual_seed(0)
        shape = min(count, _PICTURES), 28, 28
        self.data = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        self.targets = torch.randint(0, 10, shape[:1], generator=generator)
        self.count = count
        self.transform = transform

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Any, int]:
        place = index % len(self.data)
        image, target = self.data[place], int(self.targets[place])
        return self.transform(Image.fromarray(image.numpy())), target


def cifar_training(folder: Path, count: int) -> dict[str, Any]:
    """Return CIFAR as it is trained on: crop with padding, flip, to tensor, normalise."""
    transform = transforms.Compose(
        [
            transforms.RandomCrop(32, padding=4),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(_MEAN, _STD),
        ]
    )
    return {"dataset": CIFAR(count, transform), "shuffle": True}


def cifar_evaluation(folder: Path, count: int) -> dict[str, Any]:
    """Return CIFAR as it is evaluated: to tensor, normalise."""
    transform = transforms.Compose(
        [transforms.ToTensor(), transforms.Normalize(_MEAN, _STD)],
    )
    return {"dataset": CIFAR(count, transform)}


def mnist(folder: Path, count: int) -> dict[str, Any]:
    """Return MNIST: to tensor, normalise, as in torch's own example."""
    transform = transforms.Compose(
        [transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))]
    )
    return {"dataset": MNIST(count, transform), "shuffle": True}
