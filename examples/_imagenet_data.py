"""The images of the ImageNet programs: folders, transforms and loaders."""

from __future__ import annotations

import copy
import zlib
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

import torchvision
from _imagenet import SetupError
from torch.utils.data import DataLoader as TorchDataLoader, Dataset, DistributedSampler, Subset
from torchvision.transforms import v2

import spdl_torch

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    import torch
    from torch import nn

LOADERS = {
    "ours": (spdl_torch.DataLoader, spdl_torch.ImageFolder),
    "torch": (TorchDataLoader, spdl_torch.ImageFolder),
    "torchvision": (TorchDataLoader, torchvision.datasets.ImageFolder),
}
"""``--loader``: ours; the same samples in torch's loader; torch's loader and dataset."""
AUTO_AUGMENT: dict[str, Callable[..., nn.Module]] = {
    "ra": v2.RandAugment,
    "ta_wide": v2.TrivialAugmentWide,
    "augmix": v2.AugMix,
    "imagenet": v2.AutoAugment,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Pixels:
    """The size, resampling and normalisation that a model was trained with."""

    size: int
    """Edge of the square, in pixels."""
    resize: int
    """Pixels of the shorter edge, from whose middle the square is cut for validation."""
    interpolation: v2.InterpolationMode = v2.InterpolationMode.BILINEAR
    mean: Sequence[float] = (0.485, 0.456, 0.406)
    """Red, green and blue of ImageNet, in 0 to 1."""
    std: Sequence[float] = (0.229, 0.224, 0.225)


@dataclass(frozen=True, kw_only=True, slots=True)
class Folders:
    """The images, before any transform; a part is a folder and the indices of its samples."""

    train: Any
    """An ImageFolder, or None where there is only val/."""
    train_indices: Sequence[int]
    validation: Any
    validation_indices: Sequence[int]
    classes: Sequence[str]
    """Their names, in the order of the targets."""


def open_folders(options: argparse.Namespace) -> Folders:
    """Find the images under ``--data`` and print what was found.

    One folder of class folders is split by the checksums of the files' names: the same files are
    held out on every machine, and few change sides when files are added.
    """
    root, kind = options.data, LOADERS[options.loader][1]
    if not root.is_dir():
        raise SetupError(f"--data {root}: there is no such folder.")
    if (root / "train").is_dir() and not (root / "val").is_dir():
        raise SetupError(
            f"--data {root}: there is train/ and no val/. Give {root / 'train'} to hold out a part "
            "of it."
        )
    try:
        if (root / "val").is_dir():
            validation = kind(str(root / "val"))
            train = kind(str(root / "train")) if (root / "train").is_dir() else None
            indices, held_out = range(len(train or ())), range(len(validation))
        else:
            train = kind(str(root))
            validation = copy.copy(train)
            indices, held_out = _hold_out(train, root, options.val_fraction)
    except FileNotFoundError as error:
        raise SetupError(
            f"--data {root}: {shorten(str(error), 200)} Expected train/<class>/*.JPEG and "
            "val/<class>/*.JPEG, or one folder of class folders."
        ) from error
    if train is None and not options.eval_only:
        raise SetupError(f"--data {root}: there is val/ and no train/. Use --eval-only.")
    if not options.eval_only and not indices:
        raise SetupError(f"--data {root}: no image is left to train with; lower --val-fraction.")
    classes = (validation if train is None else train).classes
    if train is not None:
        relabel(validation, classes)
    return Folders(
        train=train,
        train_indices=_spread(indices, options.limit),
        validation=validation,
        validation_indices=_spread(held_out, options.limit),
        classes=classes,
    )


def _hold_out(folder: Any, root: Path, fraction: float) -> tuple[list[int], list[int]]:
    """Return the indices to train with, and those to validate with, at least one."""

    def checksum(index: int) -> tuple[int, str]:
        name = Path(folder.samples[index][0]).relative_to(root).as_posix()
        return zlib.crc32(name.encode()), name

    count = min(max(round(len(folder) * fraction), 1), len(folder))
    by_checksum = sorted(range(len(folder)), key=checksum)
    return sorted(by_checksum[count:]), sorted(by_checksum[:count])


def _spread(indices: Sequence[int], limit: int | None) -> Sequence[int]:
    total = len(indices)
    if limit is None or limit >= total:
        return indices
    return [indices[k * total // limit] for k in range(limit)]


def relabel(folder: Any, classes: Sequence[str]) -> None:
    """Renumber the folder's targets to match ``classes``."""
    number = {name: k for k, name in enumerate(classes)}
    if unknown := [name for name in folder.classes if name not in number]:
        raise SetupError(
            f"{folder.root}: class {unknown[0]!r} (and {len(unknown) - 1} more) is not among the "
            f"{len(classes)} that the model is trained for."
        )
    folder.samples = [(path, number[folder.classes[k]]) for path, k in folder.samples]
    folder.imgs, folder.targets = folder.samples, [k for _, k in folder.samples]
    folder.classes, folder.class_to_idx = list(classes), number


def train_dataset(options: argparse.Namespace, folders: Folders, pixels: Pixels) -> Dataset[Any]:
    """Return random crops, flips and whatever else was asked for: uint8 (3, size, size)."""
    steps = [
        v2.RandomResizedCrop(pixels.size, interpolation=pixels.interpolation, antialias=True),
        v2.RandomHorizontalFlip(),
    ]
    if options.auto_augment:
        steps.append(AUTO_AUGMENT[options.auto_augment](interpolation=pixels.interpolation))
    # Bytes leave the loader, a quarter of the size of floats; `ToFloat` normalises on the device.
    steps.append(v2.PILToTensor())
    if options.random_erase:
        grey = tuple(round(255 * value) for value in pixels.mean)  # 0, once it is normalised
        steps.append(v2.RandomErasing(options.random_erase, value=grey))
    folder = copy.copy(folders.train)
    folder.transform = v2.Compose(steps)
    return Subset(folder, folders.train_indices)


def validation_dataset(
    folders: Folders, pixels: Pixels, *, rank: int, num_ranks: int
) -> Dataset[Any]:
    """Return the central crops: uint8 (3, size, size); each image belongs to exactly one rank.

    torch's DistributedSampler would repeat images to give every rank equally many, and those would
    count twice.
    """
    folder = copy.copy(folders.validation)
    folder.transform = v2.Compose(
        [
            v2.Resize(pixels.resize, interpolation=pixels.interpolation, antialias=True),
            v2.CenterCrop(pixels.size),
            v2.PILToTensor(),
        ]
    )
    return Subset(folder, folders.validation_indices[rank::num_ranks])


def make_loader(
    options: argparse.Namespace,
    dataset: Dataset[Any],
    *,
    device: torch.device,
    sampler: DistributedSampler[Any] | None = None,
) -> TorchDataLoader[Any]:
    """Return the loader that ``--loader`` names; with a sampler, one for training.

    Ours delivers batches on a CUDA device, torch's in page-locked memory. For training, a last
    batch that is not full is left out unless it is the only one: batch norm needs more than one
    image.
    """
    on_cuda = device.type == "cuda"
    ours = options.loader == "ours"
    return LOADERS[options.loader][0](
        dataset,
        batch_size=options.batch_size,
        sampler=sampler,
        num_workers=options.workers,
        prefetch_factor=options.prefetch_factor if options.workers else None,
        # Threads start in no time, and those of a new epoch draw their seed anew, so that it can be
        # repeated; processes are slow to start.
        persistent_workers=options.workers > 0 and not ours,
        drop_last=sampler is not None and len(sampler) >= options.batch_size,
        **({"device": device} if on_cuda and ours else {"pin_memory": on_cuda}),
    )
