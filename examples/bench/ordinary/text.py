"""Text: words counted in Python, a tokenizer written in Rust, JSON lines, a stream of lines."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import IterableDataset, get_worker_info

from .data import Repeated, written

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
