"""Pictures: small ones in memory; photographs on disk by ImageFolder, OpenCV and albumentations,
and with masks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torchvision import datasets, transforms, tv_tensors
from torchvision.transforms import v2

from spdl_torch.demo.photographs import write_photographs

from .catalogue import Repeated, files_in, written

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_PICTURES = 10_000
_NORMALIZE = transforms.Normalize((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
_PHOTOGRAPHS = 96
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_TO_TENSOR = (transforms.ToTensor(), transforms.Normalize(_MEAN, _STD))
_CROP = (transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip())


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


def _photographs(folder: Path, count: int) -> Path:
    """Return the folder of class folders that all datasets here read."""
    number = min(count, _PHOTOGRAPHS)
    return written(folder / "photographs", lambda root: write_photographs(root, number))


def _paths(folder: Path, count: int) -> list[Path]:
    return sorted(_photographs(folder, count).glob("*/*.jpg"))


def _image_folder(folder: Path, count: int, *steps: Any, version: Any = transforms) -> Any:
    """Return torchvision's ImageFolder over ``count`` pictures, repeating the folder's."""
    dataset = datasets.ImageFolder(str(_photographs(folder, count)), version.Compose(steps))
    samples = dataset.samples
    dataset.samples = [samples[index % len(samples)] for index in range(count)]
    return dataset


def training_v1(folder: Path, count: int) -> Any:
    """Return the dataset with ImageNet's recipe, as in torch's example."""
    return _image_folder(folder, count, *_CROP, *_TO_TENSOR)


def training_v2(folder: Path, count: int) -> Any:
    """Return the same with v2 transforms on tensors, as in torchvision's documentation."""
    return _image_folder(
        folder,
        count,
        v2.ToImage(),
        v2.RandomResizedCrop(size=(224, 224), antialias=True),
        v2.RandomHorizontalFlip(p=0.5),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(mean=list(_MEAN), std=list(_STD)),
        version=v2,
    )


def rand_augment(folder: Path, count: int) -> Any:
    """Return the dataset with the recipe of today's training scripts: RandAugment and random
    erasing."""
    erase = transforms.RandomErasing(p=0.1)
    return _image_folder(folder, count, *_CROP, transforms.RandAugment(), *_TO_TENSOR, erase)


def evaluation(folder: Path, count: int) -> Any:
    """Return the dataset of the pictures' central crops."""
    resize = transforms.Resize(256), transforms.CenterCrop(224)
    return _image_folder(folder, count, *resize, *_TO_TENSOR)


class OpenCVPhotographs(Repeated):
    """Read and resized by OpenCV, scaled by numpy."""

    def __init__(self, folder: Path, count: int) -> None:
        super().__init__(_paths(folder, count), count)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        import cv2

        image = cv2.imread(str(self.source[index % len(self.source)]))
        image = cv2.cvtColor(image, cv2.COLOR_BGR2RGB)
        image = cv2.resize(image, (224, 224), interpolation=cv2.INTER_AREA)
        image = image.astype(np.float32) / 255.0
        return torch.from_numpy(image.transpose(2, 0, 1)), index % 10


class AugmentedPhotographs(Repeated):
    """Read by OpenCV, transformed by albumentations with the recipe of its classification
    example."""

    def __init__(self, folder: Path, count: int) -> None:
        import albumentations
        from albumentations.pytorch import ToTensorV2

        super().__init__(_paths(folder, count), count)
        self.transform = albumentations.Compose(
            [
                albumentations.RandomResizedCrop(size=(224, 224)),
                albumentations.HorizontalFlip(p=0.5),
                albumentations.RandomBrightnessContrast(p=0.5),
                albumentations.Normalize(mean=_MEAN, std=_STD),
                ToTensorV2(),
            ]
        )

    def __getitem__(self, index: int) -> tuple[Any, int]:
        import cv2

        image = cv2.imread(str(self.source[index % len(self.source)]))
        image = cv2.cvtColor(image, cv2.COLOR_BGR2RGB)
        return self.transform(image=image)["image"], index % 10


class Segmentation(Repeated):
    """A photograph and its mask, both cropped to 256 x 256 and flipped."""

    def __init__(self, folder: Path, count: int) -> None:
        super().__init__(_paths(folder, count), count)

        def write(path: Path, number: int) -> None:
            with Image.open(self.source[number]) as image:
                grey = np.asarray(image.convert("L"))
            Image.fromarray(grey // 64).save(path, format="PNG")  # four classes, by brightness

        self.masks = files_in(folder / "masks", len(self.source), write)
        to_type = {tv_tensors.Image: torch.float32, tv_tensors.Mask: torch.int64}
        self.transform = v2.Compose(
            [
                v2.RandomResizedCrop(size=(256, 256), antialias=True),
                v2.RandomHorizontalFlip(p=0.5),
                v2.ToDtype(to_type, scale=True),
                v2.Normalize(mean=list(_MEAN), std=list(_STD)),
            ]
        )

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        place = index % len(self.source)
        image = tv_tensors.Image(Image.open(self.source[place]).convert("RGB"))
        mask = tv_tensors.Mask(Image.open(self.masks[place]))
        image, mask = self.transform(image, mask)
        return image, mask
