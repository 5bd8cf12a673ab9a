"""The last indices before a state's position: they show whether an order drawn anew is the same.

A sampler may draw its order from what no state has: ``random``, numpy, a generator of its own. Then
it gives another order when it is resumed, of which a position means nothing. A state has a checksum
of them.
"""

from __future__ import annotations

import operator
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DistributedSampler

from ..sampling.sampler_chain import keeper_of_unknown_epoch, names_of, nested_samplers, num_ranks

if TYPE_CHECKING:
    from collections.abc import Iterable

NUM_LAST = 8
"""The number of indices that count."""

LastIndices = tuple[Any, ...]
"""As plain values; () = nothing is known of them."""


def last_of(indices: Iterable[Any], *, in_batches: bool) -> LastIndices:
    """Return the last of the samples' indices in what a sampler gave.

    ``in_batches``: whether it gives those of a batch at once.
    """
    last: list[Any] = []
    for index in indices:
        is_batch = in_batches and isinstance(index, _BATCHES) and getattr(index, "ndim", 1) > 0
        last = [*last, *map(_plain, index[-NUM_LAST:] if is_batch else (index,))][-NUM_LAST:]
    return tuple(last)


def checksum_of(last: LastIndices) -> int | None:
    """Return the checksum of the last indices; None = nothing is known of them."""
    return zlib.crc32(repr(last).encode()) if last else None


def tell_order(index_sampler: Any) -> bool:
    """Return whether the last indices say something new of the sampler's order. Not if there are
    several ranks, as any of them may resume the state; if the sampler begins at a position; or if
    it is torch's, whose order follows from a seed that every state has.
    """
    for each in nested_samplers(index_sampler):
        if hasattr(each, "start_at") or type(each) is DistributedSampler:
            return False
    return num_ranks(index_sampler) == 1


def other_order(samplers: list[Any]) -> ValueError:
    """Return the error where a sampler does not give the indices that it gave."""
    names = names_of(samplers[0])
    keeper = keeper_of_unknown_epoch(samplers[0])
    if keeper is not None:
        return ValueError(
            f"load_state_dict: sampler_epoch: the sampler ({names}) gives other indices than it "
            "gave before this position. It is probably in another epoch: the state lacks the "
            f"number, since {type(keeper).__name__} does not keep what its set_epoch() is given in "
            "an attribute named epoch. Call set_epoch() with that number between load_state_dict() "
            "and iter(), and set self.epoch in set_epoch(), so that states have it."
        )
    return ValueError(
        f"load_state_dict: order: the sampler ({names}) gives other indices than it gave before "
        "this position. In another order samples would be lost, or come twice. If nothing else was "
        "changed, it draws from what no state has, such as random, numpy or a generator that it "
        "makes: let it seed that by the number given to set_epoch(), draw from a torch.Generator "
        "that is its attribute generator, or have state_dict() and load_state_dict(state). Or "
        "another thread drew from torch's global generator when that epoch began: pass generator=."
    )


_BATCHES = (list, tuple, np.ndarray, torch.Tensor)


def _plain(index: Any) -> Any:
    """Return a value whose text is the same in every process."""
    try:
        return operator.index(index)
    except Exception:  # no number, or one of the user's whose method fails
        if isinstance(index, np.ndarray | torch.Tensor):
            index = index.reshape(-1)[:NUM_LAST].tolist()
        if isinstance(index, list | tuple):
            return [*map(_plain, index[:NUM_LAST])]
        return index if isinstance(index, str | bytes | float) else type(index).__name__
