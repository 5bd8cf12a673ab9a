"""A few values of a dataset or sampler that holds plain data, as a number: to tell it from another.

It reads up to eight samples where they lie in memory, and calls no code of the user's.
"""

from __future__ import annotations

from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch.utils.data import (
    ConcatDataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

_NUM_PLACES = 8
_MOST_VALUES = 64
"""The most entries of a list, or characters, that are read of a sample."""
_MOST_NUMBERS = 8
"""The most numbers of an array or tensor that are read of a sample."""
_MOST_DEEP = 4
_NUMBERS = (bool, int, float, complex, type(None), np.generic)


def contents_of(dataset: Any) -> str | None:
    """Return a checksum of some of the dataset's values; None = it holds other things than data."""
    try:
        text = _of_dataset(dataset)
    except Exception:  # memory that cannot be read here, a file that was cut off
        return None
    return None if text is None else f"{crc32(text.encode(errors='replace')):08x}"


def settings_of(sampler: Any) -> str | None:
    """Return a checksum of what the order of one of torch's samplers, or of a list of indices,
    follows from beside its seed; None = it is another sampler.
    """
    kind = type(sampler)
    try:
        if kind in _CONTAINERS:
            values = [len(sampler), *_spread(sampler)]
        elif kind in _SETTINGS:
            parts = [getattr(sampler, name) for name in _SETTINGS[kind]]
            values = [_spread(each) if type(each) in _CONTAINERS else each for each in parts]
        else:
            return None
        return f"{crc32(text_of(values).encode(errors='replace')):08x}"
    except Exception:  # a dataset without a length, say
        return None


def length_of(dataset: Any) -> int | None:
    """Return the dataset's length; None = it has none."""
    try:
        return len(dataset)
    except Exception:  # the user's: who wants to know gets the error
        return None


def _of_dataset(dataset: Any) -> str | None:
    kind = type(dataset)
    if kind is TensorDataset:
        return text_of([_spread(each) for each in dataset.tensors])
    if kind is Subset:
        inner = _of_dataset(dataset.dataset)
        indices = dataset.indices
        return f"{inner} {text_of(_spread(indices)) if type(indices) in _CONTAINERS else None}"
    if kind is ConcatDataset:
        return text_of([(len(each), _of_dataset(each)) for each in dataset.datasets])
    if kind.__module__.startswith("spdl_torch.") and hasattr(dataset, "_identity"):
        return text_of([_of_dataset(each) or each for each in dataset._identity()])
    return text_of(_spread(dataset)) if kind in _CONTAINERS else None


_SETTINGS: dict[type, tuple[str, ...]] = {
    RandomSampler: ("replacement", "num_samples"),
    SubsetRandomSampler: ("indices",),
    WeightedRandomSampler: ("weights", "num_samples", "replacement"),
}
_CONTAINERS = (list, tuple, range, np.ndarray, np.memmap, torch.Tensor)


def _spread(values: Any) -> list[Any]:
    """Return some values, from the first to the last."""
    length = len(values)
    places = sorted({number * (length - 1) // (_NUM_PLACES - 1) for number in range(_NUM_PLACES)})
    return [values[place] for place in places] if length else []


def text_of(value: Any, depth: int = 0) -> str:
    """Return a value in words; of other objects than plain data, the type alone."""
    if isinstance(value, torch.Tensor):
        value = value.detach()
        is_here = value.device.type == "cpu" and value.layout is torch.strided
        shown = value.reshape(-1)[:_MOST_NUMBERS].tolist() if is_here else None
        return f"{value.dtype} {tuple(value.shape)} {shown}"
    if isinstance(value, np.ndarray):
        shown = None if value.dtype.hasobject else value.reshape(-1)[:_MOST_NUMBERS].tolist()
        return f"{value.dtype} {value.shape} {shown}"
    if isinstance(value, str | bytes):
        return repr(value[:_MOST_VALUES])
    if isinstance(value, _NUMBERS):
        return repr(value.item() if isinstance(value, np.generic) else value)
    if isinstance(value, list | tuple) and depth < _MOST_DEEP:
        return f"[{', '.join(text_of(each, depth + 1) for each in value[:_MOST_VALUES])}]"
    return type(value).__name__
