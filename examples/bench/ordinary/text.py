"""Text: words counted in Python, a tokenizer written in Rust, JSON lines, a stream of lines."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from .data import written

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

_TEXTS = 4096
_WORDS = 5000
_SYLLABLES = ("ba", "den", "lo", "mi", "ru", "sa", "ter", "ven", "wi", "xo")


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


class PythonText(Dataset[Any]):
    """Split by a regular expression, looked up in a dictionary."""

    def __init__(self, texts: list[str], count: int) -> None:
        self.texts = texts
        self.count = count
        self.pattern = re.compile(r"\w+|[^\w\s]")
        words = sorted({word for text in texts for word in self.pattern.findall(text.lower())})
        self.vocabulary = {word: number for number, word in enumerate(words, 2)}

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Any, int]:
        text = self.texts[index % len(self.texts)]
        words = self.pattern.findall(text.lower())
        return torch.tensor([self.vocabulary.get(word, 1) for word in words]), index % 2


def pad_batch(samples: Sequence[tuple[Any, int]]) -> tuple[Any, Any, Any]:
    """Return texts padded with 0 to the longest of the batch, their lengths, and labels."""
    texts = [text for text, _ in samples]
    lengths = torch.tensor([len(text) for text in texts])
    labels = torch.tensor([label for _, label in samples])
    return pad_sequence(texts, batch_first=True, padding_value=0), lengths, labels


class TokenizedText(Dataset[Any]):
    """Texts encoded on access and padded to one length, as for fine-tuning language models."""

    def __init__(self, texts: list[str], tokenizer: Any, count: int) -> None:
        self.texts = texts
        self.tokenizer = tokenizer
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        encoded = self.tokenizer.encode(self.texts[index % len(self.texts)])
        return {
            "input_ids": torch.tensor(encoded.ids),
            "attention_mask": torch.tensor(encoded.attention_mask),
            "labels": torch.tensor(index % 2),
        }


class JSONLines(Dataset[Any]):
    """Lines held in memory, parsed on access."""

    def __init__(self, path: Path, count: int) -> None:
        self.lines = path.read_text().splitlines()
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        record = json.loads(self.lines[index % len(self.lines)])
        features = torch.tensor(record["features"])
        return {"id": record["id"], "features": features, "label": record["label"]}


class Lines(IterableDataset[Any]):
    """The lines of a file of numbers; each worker takes its share."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        with open(self.path) as file:
            for number, line in enumerate(file):
                if number % step != first:
                    continue
                *values, label = line.rstrip("\n").split(",")
                yield torch.tensor([float(value) for value in values]), int(label)


def python_text(folder: Path, count: int) -> dict[str, Any]:
    """Return the dataset, shuffled, padded by the collate function."""
    return {"dataset": PythonText(_texts(count), count), "shuffle": True, "collate_fn": pad_batch}


def rust_tokenizer(folder: Path, count: int) -> dict[str, Any]:
    """Return the dataset with byte pairs learned from the texts themselves, on the spot."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    texts = _texts(count)
    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(
        vocab_size=2000, special_tokens=["[PAD]", "[UNK]"], show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.enable_truncation(128)
    tokenizer.enable_padding(length=128)
    return {"dataset": TokenizedText(texts, tokenizer, count), "shuffle": True}


def json_lines(folder: Path, count: int) -> dict[str, Any]:
    """Return the dataset of 32 numbers a line, shuffled."""
    rows = np.random.default_rng(0).random((min(count, _TEXTS), 32)).round(6).tolist()
    records = [
        {"id": f"record-{number}", "features": row, "label": number % 10}
        for number, row in enumerate(rows)
    ]
    text = "\n".join(map(json.dumps, records)) + "\n"
    path = written(folder / "lines.jsonl", lambda path: path.write_text(text))
    return {"dataset": JSONLines(path, count), "shuffle": True}


def iterable_lines(folder: Path, count: int) -> dict[str, Any]:
    """Return the dataset of 16 numbers and a label a line; an iterable has no shuffle."""
    rows = np.random.default_rng(0).random((count, 16)).round(6).tolist()
    lines = [",".join(map(str, [*row, number % 10])) for number, row in enumerate(rows)]
    text = "\n".join(lines) + "\n"
    return {"dataset": Lines(written(folder / "lines.csv", lambda path: path.write_text(text)))}
