"""Pictures like CIFAR-10's, and a dataset as everybody writes it for them."""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image
from torch.utils.data import Dataset
from torchvision.transforms import (
    Compose,
    Normalize,
    RandomCrop,
    RandomHorizontalFlip,
    ToTensor,
)

_NUM_DIFFERENT = 10_000
_PIXELS = 32


class Pictures(Dataset[Any]):
    """``num_images`` pictures of 10 classes, uint8 of 32 x 32 x 3 in one array, 30 MB at most.

    A sample is a picture, cropped, flipped and normalised, float32 of 3 x 32 x 32, and its label.
    """

    def __init__(self, num_images: int) -> None:
        generator = np.random.default_rng(0)
        shape = (min(num_images, _NUM_DIFFERENT), _PIXELS, _PIXELS, 3)
        self.data = generator.integers(0, 256, shape, dtype=np.uint8)
        self.classes = [f"class_{label}" for label in range(10)]
        self.num_images = num_images
        self.transform = Compose(
            [
                RandomCrop(_PIXELS, padding=4),
                RandomHorizontalFlip(),
                ToTensor(),
                Normalize((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
            ]
        )

    def __len__(self) -> int:
        return self.num_images

    def __getitem__(self, index: int) -> tuple[Any, int]:
        place = index % len(self.data)
        return self.transform(Image.fromarray(self.data[place])), place % len(self.classes)
