"""A copy of a dataset that shares only large arrays with it, and what cannot be copied."""

from __future__ import annotations

import threading
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..data.workers.dataset_copies import own_copy
from ..data.workers.worker_info import rebound
from ..objects.copies import deep_copy
from ..objects.members import Unfinished, members, walk

if TYPE_CHECKING:
    from collections.abc import Callable

_LARGE_BYTES = 1 << 26
_MOST_OBJECTS = 5_000
_MOST_MEMBERS = 1_000


def private_copy(
    dataset: Any, collate_fn: Callable[[Any], Any] | None
) -> tuple[Any, Callable[[Any], Any] | None]:
    """Copy both deeply, as a process would have them; a method of the dataset becomes its copy's.

    What cannot be copied is shared: an open file, a generator, a lock.
    """
    memo = _large_in(dataset)
    own = _deep_copy(dataset, memo)
    if own is dataset:
        own = _copy_by_attributes(dataset, memo)
    if collate_fn is None:
        return own, None
    bound = rebound(collate_fn, dataset, own)
    return own, _deep_copy(collate_fn, memo) if bound is collate_fn else bound


def _deep_copy(value: Any, memo: dict[int, Any]) -> Any:
    """Return a deep copy, or the value itself if there is none."""
    try:
        return deep_copy(value, memo)
    except Exception:  # a handle, a generator, a lock, or a class that refuses
        return value


def _copy_by_attributes(dataset: Any, memo: dict[int, Any]) -> Any:
    """Copy what can be copied of a dataset whose copy as a whole fails."""
    memo.clear()  # the attempt may have left partial copies
    memo.update(_large_in(dataset))
    own = own_copy(dataset, threading.Lock())
    if own is dataset or not hasattr(own, "__dict__"):
        return own
    memo[id(dataset)] = own
    for name, value in tuple(vars(own).items()):
        vars(own)[name] = _deep_copy(value, memo)
    return own


def _large_in(dataset: Any) -> dict[int, Any]:
    """Return the large arrays that a dataset leads to, by id: what a copy may share."""
    found: dict[int, Any] = {}
    with suppress(Unfinished):
        for _, value in walk([("", dataset)], partial(members, most=_MOST_MEMBERS), _MOST_OBJECTS):
            if isinstance(value, torch.Tensor | np.ndarray) and value.nbytes > _LARGE_BYTES:
                found[id(value)] = value
    return found
