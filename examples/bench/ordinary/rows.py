"""Samples that cost microseconds to take: rows and windows in memory, tokens in a memory map,
graphs of different sizes; and text: words counted in Python, a tokenizer written in Rust, JSON
lines, a stream of lines."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, IterableDataset, TensorDataset, get_worker_info

from .catalogue import Repeated, written

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

_COLUMNS = 64
_TOKENS = 1_000_000
_BLOCK = 256
_TEXTS = 4096
_WORDS = 5000
_SYLLABLES = ("ba", "den", "lo", "mi", "ru", "sa", "ter", "ven", "wi", "xo")


def _floats(count: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(count, *shape, generator=generator)


class IndexedRows(Repeated):
    """A row and its number."""

    def __init__(self, folder: Path, count: int) -> None:
        super().__init__(_floats(count, _COLUMNS), count)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.source[index], index


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


def _texts(count: int) -> list[str]:
    """Return sentences of 10 to 80 words, whose frequencies are skewed as in natural language."""
    generator = np.random.default_rng(0)
    picks = generator.integers(0, len(_SYLLABLES), (_WORDS, 3))
    words = np.array(["".join(_SYLLABLES[i] for i in row[: 1 + row[0] % 3]) for row in picks])
    texts = []
    for length in generator.integers(10, 81, min(count, _TEXTS)):
        chosen = words[generator.zipf(1.3, length) % _WORDS]
        texts.append(" ".join(chosen).capitalize() + ".")
    return texts


class PythonText(Repeated):
    """Split by a regular expression, looked up in a dictionary, padded by the collate function."""

    def __init__(self, folder: Path, count: int) -> None:
        super().__init__(_texts(count), count)
        self.pattern = re.compile(r"\w+|[^\w\s]")
        found = {word for text in self.source for word in self.pattern.findall(text.lower())}
        self.vocabulary = {word: number for number, word in enumerate(sorted(found), 2)}

    def __getitem__(self, index: int) -> tuple[Any, int]:
        text = self.source[index % len(self.source)]
        words = self.pattern.findall(text.lower())
        return torch.tensor([self.vocabulary.get(word, 1) for word in words]), index % 2

    @staticmethod
    def collate(samples: Sequence[tuple[Any, int]]) -> tuple[Any, Any, Any]:
        """Return texts padded with 0 to the longest of the batch, their lengths, and labels."""
        texts = [text for text, _ in samples]
        lengths = torch.tensor([len(text) for text in texts])
        labels = torch.tensor([label for _, label in samples])
        return pad_sequence(texts, batch_first=True, padding_value=0), lengths, labels


class TokenizedText(Repeated):
    """Texts encoded on access and padded to one length, as for fine-tuning language models, with
    byte pairs learned from the texts themselves, on the spot."""

    def __init__(self, folder: Path, count: int) -> None:
        from tokenizers import Tokenizer, models, pre_tokenizers, trainers

        super().__init__(_texts(count), count)
        self.tokenizer: Any = Tokenizer(models.BPE(unk_token="[UNK]"))
        self.tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        trainer = trainers.BpeTrainer(
            vocab_size=2000, special_tokens=["[PAD]", "[UNK]"], show_progress=False
        )
        self.tokenizer.train_from_iterator(self.source, trainer)
        self.tokenizer.enable_truncation(128)
        self.tokenizer.enable_padding(length=128)

    def __getitem__(self, index: int) -> dict[str, Any]:
        encoded = self.tokenizer.encode(self.source[index % len(self.source)])
        return {
            "input_ids": torch.tensor(encoded.ids),
            "attention_mask": torch.tensor(encoded.attention_mask),
            "labels": torch.tensor(index % 2),
        }


class JSONLines(Repeated):
    """Lines of 32 numbers, held in memory, parsed on access."""

    def __init__(self, folder: Path, count: int) -> None:
        rows = np.random.default_rng(0).random((min(count, _TEXTS), 32)).round(6).tolist()
        lines = [
            json.dumps({"id": f"record-{number}", "features": row, "label": number % 10})
            for number, row in enumerate(rows)
        ]
        super().__init__(lines, count)

    def __getitem__(self, index: int) -> dict[str, Any]:
        record = json.loads(self.source[index % len(self.source)])
        features = torch.tensor(record["features"])
        return {"id": record["id"], "features": features, "label": record["label"]}


class Lines(IterableDataset[Any]):
    """The lines of a file: 16 numbers and a label; each worker takes its share."""

    def __init__(self, folder: Path, count: int) -> None:
        def write(path: Path) -> None:
            rows = np.random.default_rng(0).random((count, 16)).round(6).tolist()
            lines = [",".join(map(str, [*row, number % 10])) for number, row in enumerate(rows)]
            path.write_text("\n".join(lines) + "\n")

        self.path = written(folder / "lines.csv", write)

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        with open(self.path) as file:
            for number, line in enumerate(file):
                if number % step != first:
                    continue
                *values, label = line.rstrip("\n").split(",")
                yield torch.tensor([float(value) for value in values]), int(label)
