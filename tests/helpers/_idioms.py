"""Datasets as repositories write them for torch's worker processes.

An idiom is a function that makes one in an empty folder. The samples are known: mostly pairs of an
index and a value that must be equal to it. The idioms stand in ``_idioms_files.py`` (handles and
readers), ``_idioms_objects.py`` (objects that samples leave something in) and
``_idioms_process.py`` (globals, environment, settings, signals).
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

N = 240  # samples
NUMBERS = list(range(N))

_PIXELS = bytes(100_000)


def decode(value):
    """Stand in for decoding a file: hold no GIL for some 30 µs."""
    zlib.crc32(_PIXELS)
    return value


def samples_of(batch):
    """Split a batch that torch collated into its samples, as plain numbers."""
    if isinstance(batch, torch.Tensor):
        return [_plain(row) for row in batch.tolist()] if batch.ndim else [batch.item()]
    return list(zip(*map(samples_of, batch), strict=True))


def _plain(value):
    if isinstance(value, torch.Tensor | np.ndarray):
        value = value.tolist()
    return tuple(map(_plain, value)) if isinstance(value, list | tuple) else value


@dataclass(frozen=True, kw_only=True)
class Idiom:
    """A dataset, and options of its loader beside ``num_workers``."""

    dataset: Any
    options: dict[str, Any] = field(default_factory=dict)


class Samples(Dataset):
    """A map-style dataset of N samples; ``value(index)`` is to return ``index``. ``folder``: for a
    dataset that keeps files."""

    def __init__(self, folder=None):
        self.folder = folder

    def __len__(self):
        return N

    def __getitem__(self, index):
        return index, self.value(index)


IDIOMS: dict[str, Callable[[Path], Idiom]] = {}


def idiom(make):
    """Register a function that makes an Idiom in a folder of its own."""
    assert make.__name__ not in IDIOMS, make.__name__
    IDIOMS[make.__name__] = make
    return make


def simple(kind):
    """Register a dataset class whose objects need nothing but their folder, or not even that."""
    IDIOMS[kind.__name__] = lambda folder: Idiom(dataset=kind(folder))
    return kind
