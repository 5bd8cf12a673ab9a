"""A list of the datasets: the name, the function that makes it, batch size and speed."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Ordinary:
    """One dataset with the loader options that its tutorial gives it."""

    name: str
    made_by: str
    """``module.function`` in this package."""
    batch_size: int
    per_second: float
    """Rough samples a second of torch's DataLoader without workers; sets the samples in a pass."""
    needs: tuple[str, ...] = ()
    """Modules that are not dependencies of ours."""
    is_random: bool = False
    """Whether a sample differs each time, so that batches cannot be compared."""

    def arguments(self, folder: Path, count: int) -> dict[str, Any]:
        """Return the arguments of a DataLoader over ``count`` samples, except for its workers.

        Writes the data into ``folder`` if it is not there yet.
        """
        module, _, function = self.made_by.partition(".")
        made: dict[str, Any] = getattr(
            importlib.import_module(f"{__package__}.{module}"), function
        )(folder, count)
        return {"batch_size": self.batch_size, **made}


def _one(
    name: str, made_by: str, batch_size: int, per_second: float, *needs: str, random: bool = False
) -> Ordinary:
    return Ordinary(
        name=name,
        made_by=made_by,
        batch_size=batch_size,
        per_second=per_second,
        needs=needs,
        is_random=random,
    )


ORDINARY = (
    _one("CIFAR, Pillow and v1, training", "images.cifar_training", 128, 10_000, random=True),
    _one("CIFAR, Pillow and v1, evaluation", "images.cifar_evaluation", 128, 18_000),
    _one("MNIST, Pillow and v1", "images.mnist", 64, 20_000),
    _one("ImageFolder, v1", "folders.training_v1", 16, 350, random=True),
    _one("ImageFolder, v2", "folders.training_v2", 16, 350, random=True),
    _one("ImageFolder, RandAugment", "folders.rand_augment", 16, 250, random=True),
    _one("ImageFolder, evaluation", "folders.evaluation", 16, 300),
    _one("photographs, OpenCV", "folders.opencv", 16, 600, "cv2"),
    _one(
        "photographs, albumentations",
        "folders.augmented",
        16,
        550,
        "cv2",
        "albumentations",
        random=True,
    ),
    _one("segmentation, tv_tensors", "folders.segmentation", 8, 400, random=True),
    _one("rows, (x[i], i)", "rows.indexed", 64, 200_000),
    _one("rows, arithmetic", "rows.scaled", 64, 120_000),
    _one("rows, numpy to tensor", "rows.from_numpy", 64, 100_000),
    _one("rows, TensorDataset", "rows.tensor_dataset", 64, 200_000),
    _one("rows, pandas iloc", "rows.pandas_rows", 64, 20_000, "pandas"),
    _one("windows of a time series", "rows.windows", 64, 130_000),
    _one("tokens, memory-mapped", "rows.tokens", 16, 40_000),
    _one("big tensors", "rows.big_tensors", 8, 2_000),
    _one("text, pure Python, padded", "text.python_text", 32, 35_000),
    _one("text, Rust tokenizer", "text.rust_tokenizer", 32, 14_000, "tokenizers"),
    _one("JSON lines", "text.json_lines", 64, 80_000),
    _one("lines, iterable", "text.iterable_lines", 64, 90_000),
    _one("npy files", "files.npy_files", 32, 14_000),
    _one("pt files", "files.pt_files", 32, 5_000),
    _one("h5py", "files.hdf5", 32, 5_000, "h5py"),
    _one("SQLite", "files.sqlite", 64, 70_000),
    _one("audio, STFT", "signals.audio", 16, 2_000),
    _one("volumes, scipy", "signals.volumes", 4, 90, "scipy", random=True),
    _one("graphs", "signals.graphs", 32, 12_000),
)
"""The datasets, in the order of the table."""
