"""A program that has not loaded before: the draws of its first loader, in every seat.

Prints as JSON a digest for each kind of loader and each seat, each taken in a process of its own,
in which nothing that redirects torch's draws is installed yet.
"""

from __future__ import annotations

import hashlib
import json
import random
import warnings
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, default_collate, get_worker_info

from spdl_torch.loader.rng.patches import can_see_draws
from support.forks import found_in_forks
from support.seats import FORKED, NONE, THREADS

MANY = 120
"""Samples in batches of 3: for each of two workers more than are looked at for draws."""


class Draws:
    """Each sample draws from all that samples draw from: functions of torch, ``random`` and
    ``numpy.random`` (called, ``kept``, and in C++), and generators of its own."""

    thread_safe = True

    def __init__(self, length: int = 12, first: int = 0, kept: Any = ()) -> None:
        self.length = length
        self.first = first  # samples before it draw nothing
        self.kept = kept
        self.own_python = random.Random(1)
        self.own_numpy = np.random.default_rng(2)
        self.transforms = {"old": np.random.RandomState(3), "torch": torch.Generator()}

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> list[float]:
        if index < self.first:
            return [float(index)] * 16
        drawn = [float(index), torch.rand(()).item(), random.gauss(0, 1), np.random.normal()]
        drawn += [draw() for draw in self.kept]
        drawn += [self.own_python.random(), self.own_numpy.random()]
        drawn += [self.transforms["old"].rand()]
        drawn += torch.rand(2, generator=self.transforms["torch"]).tolist()
        drawn += torch.dropout(torch.ones(2), 0.5, True).tolist()
        return [*drawn, *torch.randperm(3).tolist(), random.random(), np.random.rand()]


class InBatches(Draws):
    """The same, made by the batch."""

    def __getitems__(self, indices: list[int]) -> list[list[float]]:
        return [self[index] for index in indices]


class Stream(IterableDataset):
    """Draws at the beginning and in each item; every worker makes a part of them."""

    thread_safe = True

    def __iter__(self):
        info, first = get_worker_info(), [torch.rand(()).item(), random.random(), np.random.rand()]
        for index in range(0 if info is None else info.id, 12, 1 if info is None else 2):
            yield [float(index), *first, torch.rand(()).item(), random.random(), np.random.rand()]


def collate(samples):
    """Draws too, as Mixup does."""
    return default_collate(samples), torch.rand(2), random.random(), np.random.rand()


def states_of_program():
    """torch's, Python's and numpy's, from which a loader's samples are not to draw."""
    numpys = np.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), numpys[1].tolist(), numpys[2:]


def begin(number):
    """Draws from the worker's stream, and moves it."""
    torch.manual_seed(torch.initial_seed() + int(torch.randint(9, ())))
    get_worker_info().dataset.first = int(torch.randint(4, ()))


KINDS = {
    "samples": (Draws(), {}),
    "stream": (Stream(), {}),
    "collate": (Draws(), {"collate_fn": collate}),
    "worker_init_fn": (Draws(), {"worker_init_fn": begin, "persistent_workers": True}),
    "by worker": (Draws(), {"rng": "worker"}),
    "late": (Draws(MANY, MANY - 30), {}),
}
SEATS = {seat.name: seat for seat in (NONE, THREADS, FORKED)}


def digest_of(kind: str, seat: str) -> str:
    """What two epochs draw, and what the program draws afterwards."""
    dataset, options = KINDS[kind]
    options = {"batch_size": 3, "seed": 5, "shuffle": not isinstance(dataset, Stream), **options}
    torch.manual_seed(1)
    loader = SEATS[seat].loader(dataset, **options)
    found = [batch for _ in range(2) for batch in loader]
    return hashlib.sha256(repr((found, torch.rand(1))).encode()).hexdigest()[:16]


def main() -> None:
    assert not can_see_draws()
    warnings.simplefilter("ignore")
    found = {}
    for kind in KINDS:
        digests = found_in_forks(*(partial(digest_of, kind, seat) for seat in SEATS))
        found[kind] = dict(zip(SEATS, digests, strict=True))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
