"""What a loader's sampler, or one inside it, knows: the rank, the epoch, a length, whether each
rank has a part of its own already. And an index as it was when the sampler gave it."""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DistributedSampler

from ...handlers import unless_of_handler

_EPOCH_NAMES = ("epoch", "_epoch")
"""The attributes in which samplers keep the number that ``set_epoch`` was given."""
_NUM_WRAPPED = 8  # samplers inside samplers; a bound, should one contain itself or any attribute


def shard_of(sampler: Any) -> tuple[int, int]:
    """Return ``num_replicas`` and ``rank`` of a sampler that deals out to ranks, else (1, 0)."""
    for each in nested_samplers(sampler):
        replicas, rank = getattr(each, "num_replicas", None), getattr(each, "rank", None)
        if isinstance(replicas, int) and isinstance(rank, int) and 0 <= rank < replicas:
            return replicas, rank
    return 1, 0


def num_ranks(sampler: Any) -> int:
    """Return the number of processes that load in step, this one included."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_world_size())
    return shard_of(sampler)[0]


def epoch_of(sampler: Any) -> int | None:
    """Return the epoch given to a sampler by ``set_epoch``; None if no sampler has that, or none
    keeps the number where it can be read."""
    for each in _with_epochs(sampler):
        for name in _EPOCH_NAMES:
            try:
                epoch = operator.index(getattr(each, name))
            except Exception:  # there is none, or it is no number
                continue
            if epoch >= 0:  # else none was given yet
                return epoch
    return None


def keeper_of_unknown_epoch(sampler: Any) -> Any:
    """Return the sampler that has ``set_epoch``, if nobody can read the number; else None."""
    return next(_with_epochs(sampler), None) if epoch_of(sampler) is None else None


def set_sampler_epoch(sampler: Any, epoch: int) -> None:
    """Set the epoch of the first sampler that has ``set_epoch``."""
    for each in _with_epochs(sampler):
        each.set_epoch(epoch)
        return


def _with_epochs(sampler: Any) -> Iterator[Any]:
    for each in nested_samplers(sampler):
        if callable(getattr(each, "set_epoch", None)):
            yield each


def has_length(sized: Any) -> bool:
    """Return whether a sampler or a loader has a length."""
    try:
        len(sized)
    except (TypeError, NotImplementedError):  # torch's, where what is inside has none
        return False
    return True


def length_of(sized: Any) -> int | None:
    """Return a length; None = there is none."""
    try:
        return len(sized)
    except unless_of_handler(Exception):  # the user's: who wants to know gets the error
        return None


def nested_samplers(
    sampler: Any, inside: Sequence[str] = ("sampler", "batch_sampler")
) -> Iterator[Any]:
    """Yield the sampler and those inside it, from the outside in: each is the first of these
    attributes of the one around it."""
    for _ in range(_NUM_WRAPPED):
        if sampler is None:
            return
        yield sampler
        outer, sampler = sampler, None
        for name in inside:
            if (sampler := getattr(outer, name, None)) is not None:
                break


def names_of(sampler: Any) -> str:
    """Return the classes of the sampler and of those inside it, from the outside in."""
    return " of ".join(dict.fromkeys(type(each).__name__ for each in nested_samplers(sampler)))


def is_shared_out(source: Any) -> bool:
    """Return whether each rank already has its own part: a DistributedSampler, one of
    ``spdl_torch.spdl.source``, or a wrapper of one, such as a batch sampler or a loader.
    """
    parts = nested_samplers(source, ("batch_sampler", "sampler", "_items"))
    return any(
        isinstance(each, DistributedSampler) or getattr(each, "is_shared_out", False) is True
        for each in parts
    )


def divides_itself(dataset: object) -> bool:
    """Return whether the dataset gives each rank its own part: a ``PipelineDataset``.

    Its class says so, and is not asked for by name: its module brings the engine, which most
    loaders do not need. The class is asked, as an object may answer to any attribute name.
    """
    return getattr(type(dataset), "_divides_itself", False) is True


def deals_in_turn(source: object) -> bool:
    """Return whether part ``r`` of ``n`` that the source makes is every ``n``-th item, from item
    ``r`` on: how far all ranks have come then says where any other number of them goes on.
    """
    return getattr(type(source), "_deals_in_turn", False) is True


_MUTABLE = (list, dict, set, bytearray, np.ndarray, torch.Tensor)


def unshared(index: Any) -> Any:
    """Return an index that the sampler cannot change any more.

    A sampler may yield one list, array or tensor again and again and change it in between. Loaded
    at once, each batch has its own indices; so it must in whatever loads later.
    """
    kind = type(index)
    if kind is list:
        inner = type(index[0]) if index else int
        if inner is int or not issubclass(inner, _MUTABLE):
            return index.copy()
        return [unshared(each) for each in index]
    if kind is torch.Tensor:
        return index.clone()
    if kind is np.ndarray or kind is dict or kind is set or kind is bytearray:
        return index.copy()
    return index
