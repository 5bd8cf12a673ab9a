"""Samples that cost microseconds to take: rows and windows in memory, tokens in a memory map."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import Dataset, TensorDataset

from .data import written

if TYPE_CHECKING:
    from pathlib import Path

_COLUMNS = 64
_TOKENS = 1_000_000
_BLOCK = 256


def _floats(count: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(count, *shape, generator=generator)


class IndexedRows(Dataset[Any]):
    """A row and its number."""

    def __init__(self, count: int) -> None:
        self.x = _floats(count, _COLUMNS)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.x[index], index


class ScaledRows(Dataset[Any]):
    """A row, normalised, and its label."""

    def __init__(self, count: int) -> None:
        self.x = _floats(count, _COLUMNS)
        self.y = torch.arange(count) % 10
        self.mean, self.std = self.x.mean(dim=0), self.x.std(dim=0)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        x = (self.x[index] - self.mean) / self.std
        return x, self.y[index]


class ArrayRows(Dataset[Any]):
    """A row of a numpy array, as tensors."""

    def __init__(self, count: int) -> None:
        self.features = _floats(count, _COLUMNS).numpy().astype(np.float64)
        self.labels = np.arange(count) % 10

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        x = torch.tensor(self.features[index], dtype=torch.float32)
        y = torch.tensor(self.labels[index], dtype=torch.long)
        return x, y


class FrameRows(Dataset[Any]):
    """A row of a data frame, its last column being the label."""

    def __init__(self, frame: Any) -> None:
        self.frame = frame

    def __len__(self) -> int:
        return len(self.frame)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        row = self.frame.iloc[index]
        features = torch.tensor(row.iloc[:-1].to_numpy(dtype=np.float32))
        label = torch.tensor(int(row.iloc[-1]))
        return features, label


class Windows(Dataset[Any]):
    """96 values of a time series, and the 24 that follow."""

    def __init__(self, count: int) -> None:
        self.series = _floats(count + 119, 7)
        self.past, self.future = 96, 24

    def __len__(self) -> int:
        return len(self.series) - self.past - self.future + 1

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        end = index + self.past
        return self.series[index:end], self.series[end : end + self.future]


class MappedTokens(Dataset[Any]):
    """Blocks of tokens out of a memory map, and the same shifted by one."""

    def __init__(self, path: Path, count: int) -> None:
        self.tokens = np.memmap(path, dtype=np.uint16, mode="r")
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        start = index * 7919 % (len(self.tokens) - _BLOCK - 1)
        x = torch.from_numpy(self.tokens[start : start + _BLOCK].astype(np.int64))
        y = torch.from_numpy(self.tokens[start + 1 : start + 1 + _BLOCK].astype(np.int64))
        return x, y


class BigTensors(Dataset[Any]):
    """float32 (3, 512, 512), 3 MB each."""

    def __init__(self, count: int) -> None:
        self.data = _floats(16, 3, 512, 512)
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.data[index % len(self.data)], index


def indexed(folder: Path, count: int) -> dict[str, Any]:
    """Return the dataset, shuffled."""
    return {"dataset": IndexedRows(count), "shuffle": True}


def scaled(folder: Path, count: int) -> dict[str, Any]:
    """Return the dataset, shuffled."""
    return {"dataset": ScaledRows(count), "shuffle": True}


def from_numpy(folder: Path, count: int) -> dict[str, Any]:
    """Return the dataset, shuffled."""
    return {"dataset": ArrayRows(count), "shuffle": True}


def tensor_dataset(folder: Path, count: int) -> dict[str, Any]:
    """Return torch's own, shuffled."""
    dataset = TensorDataset(_floats(count, _COLUMNS), torch.arange(count) % 10)
    return {"dataset": dataset, "shuffle": True}


def pandas_rows(folder: Path, count: int) -> dict[str, Any]:
    """Return the dataset of 16 columns, shuffled."""
    import pandas

    values = _floats(count, 16).numpy()
    frame = pandas.DataFrame(values, columns=[f"c{number}" for number in range(16)])
    frame["label"] = np.arange(count) % 10
    return {"dataset": FrameRows(frame), "shuffle": True}


def windows(folder: Path, count: int) -> dict[str, Any]:
    """Return the dataset, shuffled."""
    return {"dataset": Windows(count), "shuffle": True}


def tokens(folder: Path, count: int) -> dict[str, Any]:
    """Return the dataset of blocks of 256 out of a million tokens."""
    text = np.random.default_rng(0).integers(0, 50_257, _TOKENS, dtype=np.uint16)
    path = written(folder / "tokens.bin", text.tofile)
    return {"dataset": MappedTokens(path, count), "shuffle": True}


def big_tensors(folder: Path, count: int) -> dict[str, Any]:
    """Return the dataset of large tensors, in order."""
    return {"dataset": BigTensors(count)}
