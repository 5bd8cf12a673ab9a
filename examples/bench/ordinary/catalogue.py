"""A list of the datasets (the name, what makes it, batch size and speed), and what they share: data
on disk, written once, and samples that come again and again."""

from __future__ import annotations

import importlib
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Ordinary:
    """One dataset with the loader options that its tutorial gives it."""

    name: str
    made_by: str
    """``module.name`` in this package, called with a folder for its data, written by the first one
    that needs them, and a number of samples. Its ``collate``, if it has one, is the loader's."""
    batch_size: int
    per_second: float
    """Rough samples a second of torch's DataLoader without workers; sets the samples in a pass."""
    needs: tuple[str, ...] = ()
    """Modules that are not dependencies of ours."""
    is_random: bool = False
    """Whether a sample differs each time, so that batches cannot be compared."""
    shuffle: bool = True

    def arguments(self, folder: Path, count: int) -> dict[str, Any]:
        """Return the arguments of a DataLoader over ``count`` samples, except for its workers."""
        module, _, name = self.made_by.partition(".")
        make = getattr(importlib.import_module(f"{__package__}.{module}"), name)
        dataset = make(folder, count)
        return {
            "dataset": dataset,
            "batch_size": self.batch_size,
            "shuffle": self.shuffle or None,
            "collate_fn": getattr(dataset, "collate", None),
        }


_CV2 = ("cv2",)
ORDINARY = (
    Ordinary("CIFAR, Pillow and v1, training", "pictures.cifar_training", 128, 10_000, (), True),
    Ordinary("CIFAR, Pillow and v1, evaluation", "pictures.cifar", 128, 18_000, shuffle=False),
    Ordinary("MNIST, Pillow and v1", "pictures.mnist", 64, 20_000),
    Ordinary("ImageFolder, v1", "pictures.training_v1", 16, 350, (), True),
    Ordinary("ImageFolder, v2", "pictures.training_v2", 16, 350, (), True),
    Ordinary("ImageFolder, RandAugment", "pictures.rand_augment", 16, 250, (), True),
    Ordinary("ImageFolder, evaluation", "pictures.evaluation", 16, 300, shuffle=False),
    Ordinary("photographs, OpenCV", "pictures.OpenCVPhotographs", 16, 600, _CV2),
    Ordinary(
        "photographs, albumentations",
        "pictures.AugmentedPhotographs",
        16,
        550,
        (*_CV2, "albumentations"),
        True,
    ),
    Ordinary("segmentation, tv_tensors", "pictures.Segmentation", 8, 400, (), True),
    Ordinary("rows, (x[i], i)", "rows.IndexedRows", 64, 200_000),
    Ordinary("rows, arithmetic", "rows.ScaledRows", 64, 120_000),
    Ordinary("rows, numpy to tensor", "rows.ArrayRows", 64, 100_000),
    Ordinary("rows, TensorDataset", "rows.tensor_dataset", 64, 200_000),
    Ordinary("rows, pandas iloc", "rows.FrameRows", 64, 20_000, ("pandas",)),
    Ordinary("windows of a time series", "rows.Windows", 64, 130_000),
    Ordinary("tokens, memory-mapped", "rows.MappedTokens", 16, 40_000),
    Ordinary("big tensors", "rows.BigTensors", 8, 2_000, shuffle=False),
    Ordinary("text, pure Python, padded", "rows.PythonText", 32, 35_000),
    Ordinary("text, Rust tokenizer", "rows.TokenizedText", 32, 14_000, ("tokenizers",)),
    Ordinary("JSON lines", "rows.JSONLines", 64, 80_000),
    Ordinary("lines, iterable", "rows.Lines", 64, 90_000, shuffle=False),
    Ordinary("npy files", "files.NpyFiles", 32, 14_000),
    Ordinary("pt files", "files.PtFiles", 32, 5_000),
    Ordinary("h5py", "files.HDF5", 32, 5_000, ("h5py",)),
    Ordinary("SQLite", "files.SQLite", 64, 70_000),
    Ordinary("audio, STFT", "files.Audio", 16, 2_000),
    Ordinary("volumes, scipy", "files.Volumes", 4, 90, ("scipy",), True),
    Ordinary("graphs", "rows.Graphs", 32, 12_000),
)
"""The datasets, in the order of the table."""


class Repeated(Dataset[Any]):
    """``count`` samples, out of fewer in ``source``."""

    def __init__(self, source: Any, count: int) -> None:
        self.source = source
        self.count = count

    def __len__(self) -> int:
        return self.count


def written(path: Path, write: Callable[[Path], object]) -> Path:
    """Return ``path``, a file or a folder, which ``write`` makes if it is not there.

    It gets its name once it is complete, so that a process that is killed leaves no partial one.
    """
    if not path.exists():
        part = path.with_name(f"part-of-{path.name}")
        if part.is_dir():
            shutil.rmtree(part)
        part.unlink(missing_ok=True)
        write(part)
        part.rename(path)
    return path


def files_in(path: Path, count: int, write: Callable[[Path, int], object]) -> list[Path]:
    """Return ``count`` files of a folder; ``write(file, number)`` makes them if it is not there."""

    def write_all(root: Path) -> None:
        root.mkdir()
        for number in range(count):
            write(root / f"{number:05}", number)

    return sorted(written(path, write_all).iterdir())
