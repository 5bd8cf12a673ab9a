"""Small pictures in memory, through Pillow and torchvision's v1 transforms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torchvision import transforms

from .data import Repeated

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_PICTURES = 10_000
_NORMALIZE = transforms.Normalize((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))


class CIFAR(Repeated):
    """uint8 pictures of 32 x 32 in one array."""

    def __init__(self, count: int, transform: Callable[[Any], Any]) -> None:
        generator = np.random.default_rng(0)
        shape = min(count, _PICTURES), 32, 32, 3
        super().__init__(generator.integers(0, 256, shape, dtype=np.uint8), count)
        self.targets = generator.integers(0, 10, shape[0]).tolist()
        self.transform = transform

    def __getitem__(self, index: int) -> tuple[Any, int]:
        place = index % len(self.source)
        image, target = self.source[place], self.targets[place]
        return self.transform(Image.fromarray(image)), target


class MNIST(Repeated):
    """uint8 pictures of 28 x 28 in one tensor."""

    def __init__(self, count: int, transform: Callable[[Any], Any]) -> None:
        generator = torch.Generator().manual_seed(0)
        shape = min(count, _PICTURES), 28, 28
        pictures = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        super().__init__(pictures, count)
        self.targets = torch.randint(0, 10, shape[:1], generator=generator)
        self.transform = transform

    def __getitem__(self, index: int) -> tuple[Any, int]:
        place = index % len(self.source)
        image, target = self.source[place], int(self.targets[place])
        return self.transform(Image.fromarray(image.numpy())), target


def cifar_training(folder: Path, count: int) -> CIFAR:
    """Return CIFAR as it is trained on: crop with padding, flip, to tensor, normalise."""
    steps = [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip()]
    return CIFAR(count, transforms.Compose([*steps, transforms.ToTensor(), _NORMALIZE]))


def cifar(folder: Path, count: int) -> CIFAR:
    """Return CIFAR as it is evaluated: to tensor, normalise."""
    return CIFAR(count, transforms.Compose([transforms.ToTensor(), _NORMALIZE]))


def mnist(folder: Path, count: int) -> MNIST:
    """Return MNIST: to tensor, normalise, as in torch's own example."""
    normalize = transforms.Normalize((0.1307,), (0.3081,))
    return MNIST(count, transforms.Compose([transforms.ToTensor(), normalize]))
