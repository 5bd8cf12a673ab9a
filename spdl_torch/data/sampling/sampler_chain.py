"""What a loader's sampler, or one inside it, knows: the rank, the epoch, a length."""

from __future__ import annotations

import operator
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

_EPOCH_NAMES = ("epoch", "_epoch")
"""The attributes in which samplers keep the number that ``set_epoch`` was given."""
_NUM_WRAPPED = 8  # samplers inside samplers; a bound, should one contain itself


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
    return (s for s in nested_samplers(sampler) if callable(getattr(s, "set_epoch", None)))


def has_length(sized: Any) -> bool:
    """Return whether a sampler or a loader has a length."""
    try:
        len(sized)
    except (TypeError, NotImplementedError):  # torch's, where what is inside has none
        return False
    return True


def nested_samplers(sampler: Any) -> Iterator[Any]:
    """Yield the sampler and those inside it, from the outside in."""
    for _ in range(_NUM_WRAPPED):
        if sampler is None:
            return
        yield sampler
        inner = getattr(sampler, "sampler", None)
        sampler = getattr(sampler, "batch_sampler", None) if inner is None else inner
