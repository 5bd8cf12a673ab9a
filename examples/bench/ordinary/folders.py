"""Photographs on disk: ImageFolder, OpenCV, albumentations, and pictures with masks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset
from torchvision import datasets, transforms, tv_tensors
from torchvision.transforms import v2

from spdl_torch.measuring.photographs import write_photographs

from .data import written

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_PHOTOGRAPHS = 96
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def _photographs(folder: Path, count: int) -> Path:
    """Return the folder of class folders that all datasets here read."""
    number = min(count, _PHOTOGRAPHS)
    return written(folder / "photographs", lambda root: write_photographs(root, number))


def _masks(root: Path, masks: Path) -> None:
    """Write four classes by brightness, a mask for each photograph."""
    masks.mkdir()
    for number, path in enumerate(sorted(root.glob("*/*.jpg"))):
        with Image.open(path) as image:
            grey = np.asarray(image.convert("L"))
        Image.fromarray(grey // 64).save(masks / f"{number}.png")


def _image_folder(folder: Path, count: int, transform: Callable[[Any], Any]) -> Any:
    """Return torchvision's ImageFolder over ``count`` pictures, repeating the folder's."""
    dataset = datasets.ImageFolder(str(_photographs(folder, count)), transform=transform)
    samples = dataset.samples
    dataset.samples = [samples[index % len(samples)] for index in range(count)]
    return dataset


def training_v1(folder: Path, count: int) -> dict[str, Any]:
    """Return the dataset with ImageNet's recipe, as in torch's example."""
    transform = transforms.Compose(
        [
            transforms.RandomResizedCrop(224),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(_MEAN, _STD),
        ]
    )
    return {"dataset": _image_folder(folder, count, transform), "shuffle": True}


def training_v2(folder: Path, count: int) -> dict[str, Any]:
    """Return the same with v2 transforms on tensors, as in torchvision's documentation."""
    transform = v2.Compose(
        [
            v2.ToImage(),
            v2.RandomResizedCrop(size=(224, 224), antialias=True),
            v2.RandomHorizontalFlip(p=0.5),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(mean=list(_MEAN), std=list(_STD)),
        ]
    )
    return {"dataset": _image_folder(folder, count, transform), "shuffle": True}


def rand_augment(folder: Path, count: int) -> dict[str, Any]:
    """Return the dataset with the recipe of today's training scripts: RandAugment and random
    erasing."""
    transform = transforms.Compose(
        [
            transforms.RandomResizedCrop(224),
            transforms.RandomHorizontalFlip(),
            transforms.RandAugment(),
            transforms.ToTensor(),
            transforms.Normalize(_MEAN, _STD),
            transforms.RandomErasing(p=0.1),
        ]
    )
    return {"dataset": _image_folder(folder, count, transform), "shuffle": True}


def evaluation(folder: Path, count: int) -> dict[str, Any]:
    """Return the dataset of the pictures' central crops, in order."""
    transform = transforms.Compose(
        [
            transforms.Resize(256),
            transforms.CenterCrop(224),
            transforms.ToTensor(),
            transforms.Normalize(_MEAN, _STD),
        ]
    )
    return {"dataset": _image_folder(folder, count, transform)}


class OpenCVPhotographs(Dataset[Any]):
    """Read and resized by OpenCV, scaled by numpy."""

    def __init__(self, root: Path, count: int) -> None:
        self.paths = sorted(root.glob("*/*.jpg"))
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Any, int]:
        import cv2

        image = cv2.imread(str(self.paths[index % len(self.paths)]))
        image = cv2.cvtColor(image, cv2.COLOR_BGR2RGB)
        image = cv2.resize(image, (224, 224), interpolation=cv2.INTER_AREA)
        image = image.astype(np.float32) / 255.0
        return torch.from_numpy(image.transpose(2, 0, 1)), index % 10


def opencv(folder: Path, count: int) -> dict[str, Any]:
    """Return the dataset, shuffled."""
    return {"dataset": OpenCVPhotographs(_photographs(folder, count), count), "shuffle": True}


class AugmentedPhotographs(Dataset[Any]):
    """Read by OpenCV, transformed by albumentations."""

    def __init__(self, root: Path, count: int, transform: Any) -> None:
        self.paths = sorted(root.glob("*/*.jpg"))
        self.count = count
        self.transform = transform

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Any, int]:
        import cv2

        image = cv2.imread(str(self.paths[index % len(self.paths)]))
        image = cv2.cvtColor(image, cv2.COLOR_BGR2RGB)
        return self.transform(image=image)["image"], index % 10


def augmented(folder: Path, count: int) -> dict[str, Any]:
    """Return the dataset with the recipe of albumentations' classification example."""
    import albumentations
    from albumentations.pytorch import ToTensorV2

    transform = albumentations.Compose(
        [
            albumentations.RandomResizedCrop(size=(224, 224)),
            albumentations.HorizontalFlip(p=0.5),
            albumentations.RandomBrightnessContrast(p=0.5),
            albumentations.Normalize(mean=_MEAN, std=_STD),
            ToTensorV2(),
        ]
    )
    root = _photographs(folder, count)
    return {"dataset": AugmentedPhotographs(root, count, transform), "shuffle": True}


class Segmentation(Dataset[Any]):
    """A photograph and its mask, transformed together."""

    def __init__(self, root: Path, masks: Path, count: int, transform: Any) -> None:
        self.paths = sorted(root.glob("*/*.jpg"))
        self.masks = [masks / f"{number}.png" for number in range(len(self.paths))]
        self.count = count
        self.transform = transform

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        place = index % len(self.paths)
        image = tv_tensors.Image(Image.open(self.paths[place]).convert("RGB"))
        mask = tv_tensors.Mask(Image.open(self.masks[place]))
        image, mask = self.transform(image, mask)
        return image, mask


def segmentation(folder: Path, count: int) -> dict[str, Any]:
    """Return the dataset, picture and mask both cropped to 256 x 256 and flipped."""
    transform = v2.Compose(
        [
            v2.RandomResizedCrop(size=(256, 256), antialias=True),
            v2.RandomHorizontalFlip(p=0.5),
            v2.ToDtype({tv_tensors.Image: torch.float32, tv_tensors.Mask: torch.int64}, scale=True),
            v2.Normalize(mean=list(_MEAN), std=list(_STD)),
        ]
    )
    root = _photographs(folder, count)
    masks = written(folder / "masks", lambda path: _masks(root, path))
    return {"dataset": Segmentation(root, masks, count, transform), "shuffle": True}
