"""Datasets of every kind that a loader tells apart; worker processes import this, and no tests.

All of a length hold the same samples, so that what a loader makes of one is what it makes of any.
"""

from __future__ import annotations

import random

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info


def sample_of(index):
    """Return the sample at ``index``: what tells it, and a draw from each library's functions."""
    draws = [random.random(), np.random.rand(), float(torch.rand(()))]
    return {"index": index, "draws": torch.tensor(draws, dtype=torch.float64), "name": f"#{index}"}


class Rows(Dataset):
    """Map-style: one call a sample."""

    def __init__(self, length=24):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if not 0 <= index < self.length:
            raise IndexError(index)
        return sample_of(index)


class Broken(Exception):
    """Takes other arguments than its text."""

    def __init__(self, index, where):
        super().__init__(index, where)
        self.index = index


class BadRows(Rows):
    """Rows with a bad one."""

    def __getitem__(self, index):
        if index == 9:
            raise Broken(index, "here")
        return super().__getitem__(index)


class BatchRows(Rows):
    """Map-style: one call a batch."""

    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Stream(IterableDataset):
    """Iterable: every worker has the indices that are its own, torch's way to divide a stream."""

    def __init__(self, length=24):
        self.length = length

    def __iter__(self):
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return map(sample_of, range(first, self.length, step))


class PlacedStream(Stream):
    """Iterable, with an iterator that has a state: the next index."""

    def __iter__(self):
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return _PlacedIterator(first, step, self.length)


class _PlacedIterator:
    def __init__(self, first, step, length):
        self.next_index, self.step, self.length = first, step, length

    def __iter__(self):
        return self

    def __next__(self):
        if self.next_index >= self.length:
            raise StopIteration
        index = self.next_index
        self.next_index += self.step
        return sample_of(index)

    def state_dict(self):
        return {"next_index": self.next_index}

    def load_state_dict(self, state):
        self.next_index = state["next_index"]


class OwnPlaceStream(Stream):
    """Iterable that keeps its own position, which the next iterator goes on from."""

    def __init__(self, length=24):
        super().__init__(length)
        self.next_index = None

    def __iter__(self):
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        index = first if self.next_index is None else self.next_index
        while index < self.length:
            self.next_index = index + step
            yield sample_of(index)
            index += step
        self.next_index = None

    def state_dict(self):
        return {"next_index": self.next_index}

    def load_state_dict(self, state):
        self.next_index = state["next_index"]


def indices_alone(samples):
    """Collate to the indices."""
    return [sample["index"] for sample in samples]


MAP_STYLE = (Rows, BatchRows)
ITERABLE = (Stream, PlacedStream, OwnPlaceStream)
KINDS = (*MAP_STYLE, *ITERABLE)
