"""Samples in files: one file each (npy, pt), or all in one (HDF5, SQLite)."""

from __future__ import annotations

import contextlib
import sqlite3
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import Dataset

from .data import written

if TYPE_CHECKING:
    from pathlib import Path

_FILES = 512


def _arrays(count: int, *shape: int) -> Any:
    return np.random.default_rng(0).random((count, *shape), dtype=np.float32)


class NpyFiles(Dataset[Any]):
    """A file for each sample, written by ``np.save``."""

    def __init__(self, root: Path, count: int) -> None:
        self.paths = sorted(root.glob("*.npy"))
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Any, int]:
        array = np.load(self.paths[index % len(self.paths)])
        return torch.from_numpy(array), index % 10


class PtFiles(Dataset[Any]):
    """A file for each sample, written by ``torch.save``."""

    def __init__(self, root: Path, count: int) -> None:
        self.paths = sorted(root.glob("*.pt"))
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return torch.load(self.paths[index % len(self.paths)])


class HDF5(Dataset[Any]):
    """Rows of a file that every worker opens on first use, as h5py's users advise."""

    def __init__(self, path: Path, count: int) -> None:
        self.path = path
        self.count = count
        self.file: Any = None

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Any, int]:
        if self.file is None:
            import h5py

            self.file = h5py.File(self.path, "r")
        place = index % len(self.file["images"])
        return torch.from_numpy(self.file["images"][place]), int(self.file["labels"][place])


class SQLite(Dataset[Any]):
    """Rows of a table, over a connection that every worker opens on first use."""

    def __init__(self, path: Path, count: int) -> None:
        self.path = path
        self.count = count
        self.connection: sqlite3.Connection | None = None

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Any, int]:
        if self.connection is None:
            self.connection = sqlite3.connect(self.path)
        row = self.connection.execute(
            "SELECT features, label FROM samples WHERE id = ?", (index % _FILES,)
        ).fetchone()
        return torch.from_numpy(np.frombuffer(row[0], dtype=np.float32).copy()), row[1]


def npy_files(folder: Path, count: int) -> dict[str, Any]:
    """Return a dataset of float32 (3, 64, 64) a file, shuffled."""

    def write(root: Path) -> None:
        root.mkdir()
        for number, array in enumerate(_arrays(_FILES, 3, 64, 64)):
            np.save(root / f"{number:05}.npy", array)

    return {"dataset": NpyFiles(written(folder / "npy", write), count), "shuffle": True}


def pt_files(folder: Path, count: int) -> dict[str, Any]:
    """Return a dataset of dictionaries with float32 (3, 64, 64) and a label, one a file,
    shuffled."""

    def write(root: Path) -> None:
        root.mkdir()
        for number, array in enumerate(_arrays(_FILES, 3, 64, 64)):
            sample = {"x": torch.from_numpy(array).clone(), "y": torch.tensor(number % 10)}
            torch.save(sample, root / f"{number:05}.pt")

    return {"dataset": PtFiles(written(folder / "pt", write), count), "shuffle": True}


def hdf5(folder: Path, count: int) -> dict[str, Any]:
    """Return a dataset of float32 (3, 32, 32) a row, in chunks of one, shuffled."""
    import h5py

    def write(path: Path) -> None:
        with h5py.File(path, "w") as file:
            images = _arrays(_FILES, 3, 32, 32)
            file.create_dataset("images", data=images, chunks=(1, 3, 32, 32))
            file.create_dataset("labels", data=np.arange(_FILES) % 10)

    return {"dataset": HDF5(written(folder / "samples.h5", write), count), "shuffle": True}


def sqlite(folder: Path, count: int) -> dict[str, Any]:
    """Return a dataset of 64 floats and a label a row, shuffled."""

    def write(path: Path) -> None:
        rows = [(i, row.tobytes(), i % 10) for i, row in enumerate(_arrays(_FILES, 64))]
        with contextlib.closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("CREATE TABLE samples (id INTEGER PRIMARY KEY, features, label)")
            connection.executemany("INSERT INTO samples VALUES (?, ?, ?)", rows)

    return {"dataset": SQLite(written(folder / "samples.sqlite", write), count), "shuffle": True}
