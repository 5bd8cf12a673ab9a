"""``tiny``: samples that cost nothing, so that the loader's own cost is what is left.

Rows of 64 floats with a label, batches of 256. ``tensors``: from torch's ``TensorDataset``, of
which ours reads the rows of a batch at once. ``tabular``: from a user's class,
``return self.x[i], self.y[i]``; ``scaled``: the same with two more torch calls. ``tokens``: text of
16 to 256 tokens, padded to the longest of its batch of 64 by the collate function.

``ours`` has the loader's defaults, so users' classes load in processes there.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from .loaders import Work, bare_threads, ours, spdl_batches, spdl_items, torch_loader
from .loading import measure_loader, samples_of
from .report import Goal, cost
from .tables import LOADER_METRICS, Contender, Table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from .tables import BenchOptions

_BATCHES = {"tabular": 256, "tensors": 256, "scaled": 256, "tokens": 64}
_PER_SECOND = {"tabular": 200_000, "tensors": 200_000, "scaled": 50_000, "tokens": 20_000}
_MOST_TOKENS = 256
_SLOW = 20
"""Loaders that pass each sample alone through their engine get this many times fewer samples, so
that they take as long as the others."""


class Rows:
    """A table in memory with a label for each row."""

    def __init__(self, count: int) -> None:
        import torch

        self.x = torch.rand(count, 64)
        self.y = torch.arange(count) % 10

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.y[index]


class ScaledRows(Rows):
    """The same, with two more torch calls for each row."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.mean, self.std = self.x.mean(dim=0), self.x.std(dim=0)

    def __getitem__(self, index: int) -> Any:
        return (self.x[index] - self.mean) / self.std, self.y[index]


class Texts:
    """Token numbers of texts of different lengths, in one array, with the start of each text."""

    def __init__(self, count: int) -> None:
        import torch

        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(16, _MOST_TOKENS + 1, (count,), generator=generator)
        self.ends = lengths.cumsum(0).tolist()
        self.tokens = torch.randint(0, 30_000, (self.ends[-1],), generator=generator)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> Any:
        first = self.ends[index - 1] if index else 0
        return self.tokens[first : self.ends[index]]


def pad(samples: Sequence[Any]) -> Any:
    """Return int64, shape (N, longest)."""
    from torch.nn.utils.rnn import pad_sequence

    return pad_sequence(list(samples), batch_first=True)


def pad_to_most(samples: Sequence[Any]) -> Any:
    """Return int64, shape (N, 256): batches that all cost a trainer the same."""
    from torch.nn.functional import pad as pad_one

    batch = pad(samples)
    return pad_one(batch, (0, _MOST_TOKENS - batch.shape[1]))


def _rows_of(batch: Sequence[Any]) -> int:
    return len(batch[0])


def _prepare(options: BenchOptions, folder: Path) -> dict[str, Any]:
    return {kind: samples_of(options, rate, _BATCHES[kind]) for kind, rate in _PER_SECOND.items()}


def make_work(settings: dict[str, Any], num_samples: int, kind: str) -> Work:
    """Return one of these kinds of samples."""
    from torch.utils.data import TensorDataset

    kinds = {"scaled": ScaledRows, "tokens": Texts}
    dataset: Any = kinds.get(kind, Rows)(num_samples)
    if kind == "tensors":
        dataset = TensorDataset(dataset.x, dataset.y)
    return Work(
        dataset=dataset,
        num_samples=num_samples,
        batch_size=_BATCHES[kind],
        num_workers=settings["num_workers"],
        collate=pad if kind == "tokens" else None,
        size_of=len if kind == "tokens" else _rows_of,
        shuffle=True,
    )


def measure(contender: Contender, settings: dict[str, Any]) -> dict[str, float]:
    """Measure one pass over the samples of the contender's kind."""
    kind = contender.arguments["kind"]
    batch, count = _BATCHES[kind], settings[kind]
    if contender.name.endswith("items"):
        count = max(4, count // _SLOW // batch) * batch
    one = {**settings, "num_samples": count, "batch_size": batch}
    return measure_loader(contender, one, make_work)


def _contenders(kind: str) -> Iterator[Contender]:
    for name, run, *needs in (
        ("ours", ours),
        ("ours, 0 workers", partial(ours, num_workers=0)),
        ("ours, threads", partial(ours, isolation="thread")),
        ("ours, process", partial(ours, isolation="process")),
        ("torch, forked", torch_loader),
        ("torch, 0 workers", partial(torch_loader, num_workers=0)),
        ("SPDL, items", spdl_items, "spdl"),
        ("SPDL, batches", spdl_batches, "spdl"),
        ("bare threads", bare_threads),
    ):
        smoke = name == "ours" or (kind, name) == ("tabular", "torch, forked")
        yield Contender(f"{kind}: {name}", run, tuple(needs), {"kind": kind}, smoke)


def _goals(kind: str, inline: float, workers: float | None = None) -> Iterator[Goal]:
    """Yield those over torch's loader with as many workers, 0 and those asked for, and SPDL."""
    goal = partial(Goal, "per_second")
    yield goal(f"{kind}: ours, 0 workers", f"{kind}: torch, 0 workers", at_least=inline)
    yield goal(f"{kind}: ours", f"{kind}: torch, forked", at_least=workers)
    yield goal(f"{kind}: ours", f"{kind}: SPDL, items")
    yield goal(f"{kind}: ours", f"{kind}: SPDL, batches")


TABLES = (
    Table(
        name="tiny",
        title="64 floats and a label (batches of 256); texts of 16 to 256 tokens (of 64)",
        metrics=tuple(
            cost("cpu_us", "CPU µs/sample", 1) if metric.key == "cpu_ms" else metric
            for metric in LOADER_METRICS
        ),
        contenders=tuple(one for kind in _BATCHES for one in _contenders(kind)),
        prepare=_prepare,
        measure=measure,
        goals=(
            *_goals("tensors", inline=2, workers=4),
            *_goals("tabular", inline=0.97, workers=1.2),
            *_goals("scaled", inline=0.97, workers=1.2),
            *_goals("tokens", inline=0.97),
        ),
    ),
)
