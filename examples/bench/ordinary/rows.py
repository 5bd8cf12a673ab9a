"""Samples that cost microseconds to take: rows and windows in memory, tokens in a memory map; and
graphs of different sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import Dataset, TensorDataset

from .data import Repeated, written

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_COLUMNS = 64
_TOKENS = 1_000_000
_BLOCK = 256


def _floats(count: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(count, *shape, generator=generator)


class IndexedRows(Dataset[Any]):
    """A row and its number."""

    def __init__(self, folder: Path, count: int) -> None:
        self.x = _floats(count, _COLUMNS)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.x[index], index


class ScaledRows(Dataset[Any]):
    """A row, normalised, and its label."""

    def __init__(self, folder: Path, count: int) -> None:
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

    def __init__(self, folder: Path, count: int) -> None:
        self.features = _floats(count, _COLUMNS).numpy().astype(np.float64)
        self.labels = np.arange(count) % 10

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        x = torch.tensor(self.features[index], dtype=torch.float32)
        y = torch.tensor(self.labels[index], dtype=torch.long)
        return x, y


def tensor_dataset(folder: Path, count: int) -> TensorDataset:
    """Return torch's own."""
    return TensorDataset(_floats(count, _COLUMNS), torch.arange(count) % 10)


class FrameRows(Dataset[Any]):
    """A row of a data frame of 16 columns, and one more, the label."""

    def __init__(self, folder: Path, count: int) -> None:
        import pandas

        names = [f"c{number}" for number in range(16)]
        self.frame: Any = pandas.DataFrame(_floats(count, 16).numpy(), columns=names)
        self.frame["label"] = np.arange(count) % 10

    def __len__(self) -> int:
        return len(self.frame)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        row = self.frame.iloc[index]
        features = torch.tensor(row.iloc[:-1].to_numpy(dtype=np.float32))
        label = torch.tensor(int(row.iloc[-1]))
        return features, label


class Windows(Dataset[Any]):
    """96 values of a time series, and the 24 that follow."""

    def __init__(self, folder: Path, count: int) -> None:
        self.series = _floats(count + 119, 7)
        self.past, self.future = 96, 24

    def __len__(self) -> int:
        return len(self.series) - self.past - self.future + 1

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        end = index + self.past
        return self.series[index:end], self.series[end : end + self.future]


class MappedTokens(Repeated):
    """Blocks of 256 out of a million tokens in a memory map, and the same shifted by one."""

    def __init__(self, folder: Path, count: int) -> None:
        text = np.random.default_rng(0).integers(0, 50_257, _TOKENS, dtype=np.uint16)
        path = written(folder / "tokens.bin", text.tofile)
        super().__init__(np.memmap(path, dtype=np.uint16, mode="r"), count)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        start = index * 7919 % (len(self.source) - _BLOCK - 1)
        x = torch.from_numpy(self.source[start : start + _BLOCK].astype(np.int64))
        y = torch.from_numpy(self.source[start + 1 : start + 1 + _BLOCK].astype(np.int64))
        return x, y


class BigTensors(Repeated):
    """float32 (3, 512, 512), 3 MB each."""

    def __init__(self, folder: Path, count: int) -> None:
        super().__init__(_floats(16, 3, 512, 512), count)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.source[index % len(self.source)], index


class Graphs(Dataset[Any]):
    """Nodes with features, edges as pairs of numbers; 10 to 40 nodes."""

    def __init__(self, folder: Path, count: int) -> None:
        generator = np.random.default_rng(0)
        self.sizes = generator.integers(10, 41, count).tolist()
        self.features = torch.from_numpy(generator.random((40, 16), dtype=np.float32))
        self.edges = torch.from_numpy(generator.integers(0, 1 << 30, (2, 160)))

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> dict[str, Any]:
        nodes = self.sizes[index]
        edges = self.edges[:, : 4 * nodes] % nodes
        degree = torch.bincount(edges[1], minlength=nodes).float()
        x = torch.cat([self.features[:nodes], degree[:, None]], dim=1)
        return {"x": x, "edge_index": edges, "y": torch.tensor(index % 2)}

    @staticmethod
    def collate(graphs: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the graphs of a batch as one, whose parts are not connected."""
        nodes = [len(graph["x"]) for graph in graphs]
        begins = np.cumsum([0, *nodes[:-1]]).tolist()
        edges = [graph["edge_index"] + begin for graph, begin in zip(graphs, begins, strict=True)]
        return {
            "x": torch.cat([graph["x"] for graph in graphs]),
            "edge_index": torch.cat(edges, dim=1),
            "y": torch.stack([graph["y"] for graph in graphs]),
            "batch": torch.repeat_interleave(torch.arange(len(graphs)), torch.tensor(nodes)),
        }
