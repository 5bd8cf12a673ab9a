"""A list of the datasets: the name, what makes it, batch size and speed."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    Ordinary("CIFAR, Pillow and v1, training", "images.cifar_training", 128, 10_000, (), True),
    Ordinary("CIFAR, Pillow and v1, evaluation", "images.cifar", 128, 18_000, shuffle=False),
    Ordinary("MNIST, Pillow and v1", "images.mnist", 64, 20_000),
    Ordinary("ImageFolder, v1", "folders.training_v1", 16, 350, (), True),
    Ordinary("ImageFolder, v2", "folders.training_v2", 16, 350, (), True),
    Ordinary("ImageFolder, RandAugment", "folders.rand_augment", 16, 250, (), True),
    Ordinary("ImageFolder, evaluation", "folders.evaluation", 16, 300, shuffle=False),
    Ordinary("photographs, OpenCV", "folders.OpenCVPhotographs", 16, 600, _CV2),
    Ordinary(
        "photographs, albumentations",
        "folders.AugmentedPhotographs",
        16,
        550,
        (*_CV2, "albumentations"),
        True,
    ),
    Ordinary("segmentation, tv_tensors", "folders.Segmentation", 8, 400, (), True),
    Ordinary("rows, (x[i], i)", "rows.IndexedRows", 64, 200_000),
    Ordinary("rows, arithmetic", "rows.ScaledRows", 64, 120_000),
    Ordinary("rows, numpy to tensor", "rows.ArrayRows", 64, 100_000),
    Ordinary("rows, TensorDataset", "rows.tensor_dataset", 64, 200_000),
    Ordinary("rows, pandas iloc", "rows.FrameRows", 64, 20_000, ("pandas",)),
    Ordinary("windows of a time series", "rows.Windows", 64, 130_000),
    Ordinary("tokens, memory-mapped", "rows.MappedTokens", 16, 40_000),
    Ordinary("big tensors", "rows.BigTensors", 8, 2_000, shuffle=False),
    Ordinary("text, pure Python, padded", "text.PythonText", 32, 35_000),
    Ordinary("text, Rust tokenizer", "text.TokenizedText", 32, 14_000, ("tokenizers",)),
    Ordinary("JSON lines", "text.JSONLines", 64, 80_000),
    Ordinary("lines, iterable", "text.Lines", 64, 90_000, shuffle=False),
    Ordinary("npy files", "files.NpyFiles", 32, 14_000),
    Ordinary("pt files", "files.PtFiles", 32, 5_000),
    Ordinary("h5py", "files.HDF5", 32, 5_000, ("h5py",)),
    Ordinary("SQLite", "files.SQLite", 64, 70_000),
    Ordinary("audio, STFT", "files.Audio", 16, 2_000),
    Ordinary("volumes, scipy", "files.Volumes", 4, 90, ("scipy",), True),
    Ordinary("graphs", "rows.Graphs", 32, 12_000),
)
"""The datasets, in the order of the table."""
