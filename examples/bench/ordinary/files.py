"""Samples in files: one file each (npy, pt, WAV, volumes), or all in one (HDF5, SQLite)."""

from __future__ import annotations

import contextlib
import sqlite3
import wave
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .catalogue import Repeated, files_in, written

if TYPE_CHECKING:
    from pathlib import Path

_FILES = 512
_RATE = 16_000


def _arrays(count: int, *shape: int) -> Any:
    return np.random.default_rng(0).random((count, *shape), dtype=np.float32)


def _save(path: Path, array: Any) -> None:
    with open(path, "wb") as file:
        np.save(file, array)


class NpyFiles(Repeated):
    """float32 (3, 64, 64), a file each, written by ``np.save``."""

    def __init__(self, folder: Path, count: int) -> None:
        arrays = _arrays(_FILES, 3, 64, 64)
        paths = files_in(folder / "npy", _FILES, lambda path, n: _save(path, arrays[n]))
        super().__init__(paths, count)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        array = np.load(self.source[index % len(self.source)])
        return torch.from_numpy(array), index % 10


class PtFiles(Repeated):
    """Dictionaries with float32 (3, 64, 64) and a label, a file each, written by ``torch.save``."""

    def __init__(self, folder: Path, count: int) -> None:
        arrays = torch.from_numpy(_arrays(_FILES, 3, 64, 64))

        def write(path: Path, number: int) -> None:
            torch.save({"x": arrays[number].clone(), "y": torch.tensor(number % 10)}, path)

        super().__init__(files_in(folder / "pt", _FILES, write), count)

    def __getitem__(self, index: int) -> Any:
        return torch.load(self.source[index % len(self.source)])


class HDF5(Repeated):
    """float32 (3, 32, 32) a row, in a file that every worker opens on first use, as h5py's users
    advise."""

    file: Any = None

    def __init__(self, folder: Path, count: int) -> None:
        import h5py

        def write(path: Path) -> None:
            with h5py.File(path, "w") as file:
                images = _arrays(_FILES, 3, 32, 32)
                file.create_dataset("images", data=images, chunks=(1, 3, 32, 32))
                file.create_dataset("labels", data=np.arange(_FILES) % 10)

        super().__init__(written(folder / "samples.h5", write), count)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        if self.file is None:
            import h5py

            self.file = h5py.File(self.source, "r")
        place = index % len(self.file["images"])
        return torch.from_numpy(self.file["images"][place]), int(self.file["labels"][place])


class SQLite(Repeated):
    """64 floats and a label a row of a table, over a connection that every worker opens on first
    use."""

    connection: sqlite3.Connection | None = None

    def __init__(self, folder: Path, count: int) -> None:
        def write(path: Path) -> None:
            rows = [(i, row.tobytes(), i % 10) for i, row in enumerate(_arrays(_FILES, 64))]
            with contextlib.closing(sqlite3.connect(path)) as connection, connection:
                connection.execute("CREATE TABLE samples (id INTEGER PRIMARY KEY, features, label)")
                connection.executemany("INSERT INTO samples VALUES (?, ?, ?)", rows)

        super().__init__(written(folder / "samples.sqlite", write), count)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        if self.connection is None:
            self.connection = sqlite3.connect(self.source)
        row = self.connection.execute(
            "SELECT features, label FROM samples WHERE id = ?", (index % _FILES,)
        ).fetchone()
        return torch.from_numpy(np.frombuffer(row[0], dtype=np.float32).copy()), row[1]


class Audio(Repeated):
    """A second of sound at 16 kHz from a WAV file, as a log spectrogram."""

    def __init__(self, folder: Path, count: int) -> None:
        noise = np.random.default_rng(0).normal(0, 3000, (64, _RATE)).astype(np.int16)

        def write(path: Path, number: int) -> None:
            with wave.open(str(path), "wb") as file:
                file.setparams((1, 2, _RATE, 0, "NONE", "not compressed"))
                file.writeframes(noise[number].tobytes())

        super().__init__(files_in(folder / "audio", 64, write), count)
        self.window = torch.hann_window(400)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        with wave.open(str(self.source[index % len(self.source)]), "rb") as file:
            data = file.readframes(file.getnframes())
        sound = torch.from_numpy(np.frombuffer(data, dtype=np.int16).astype(np.float32) / 32768)
        spectrum = torch.stft(sound, 400, 160, window=self.window, return_complex=True)
        return torch.log1p(spectrum.abs().pow(2)), index % 10


class Volumes(Repeated):
    """A volume of 64 x 64 x 32 from a file, turned by a random angle."""

    def __init__(self, folder: Path, count: int) -> None:
        arrays = _arrays(8, 64, 64, 32)
        paths = files_in(folder / "volumes", 8, lambda path, n: _save(path, arrays[n]))
        super().__init__(paths, count)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        from scipy import ndimage

        volume = np.load(self.source[index % len(self.source)])
        angle = np.random.uniform(-15, 15)
        volume = ndimage.rotate(volume, angle, axes=(0, 1), reshape=False, order=1)
        volume = (volume - volume.mean()) / volume.std()
        return torch.from_numpy(volume[None].astype(np.float32)), index % 2
