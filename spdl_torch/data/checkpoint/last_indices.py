"""The last indices before a state's position: they show whether an order drawn anew is the same.

A sampler may draw its order from what no state has: ``random``, numpy, a generator of its own. Then
it gives another order when it is resumed, of which a position means nothing.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DistributedSampler

from ..sampling.sampler_chain import keeper_of_unknown_epoch, nested_samplers, num_ranks

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

NUM_LAST = 8
"""The number of indices that a state has of those before it."""
_MOST_CHARACTERS = 80

LastIndices = tuple[int | str, ...]
"""() = nothing is known of them."""


def last_of(indices: Iterable[Any], *, in_batches: bool) -> LastIndices:
    """Return the last of the samples' indices in what a sampler gave, as numbers or text.

    ``in_batches``: whether it gives those of a batch at once.
    """
    last: list[int | str] = []
    for index in indices:
        is_batch = in_batches and isinstance(index, _BATCHES) and getattr(index, "ndim", 1) > 0
        last = [*last, *map(_plain, index[-NUM_LAST:] if is_batch else (index,))][-NUM_LAST:]
    return tuple(last)


def tell_order(index_sampler: Any) -> bool:
    """Return whether the last indices say something new of the sampler's order. Not if there are
    several ranks, as any of them may resume the state; if the sampler begins at a position; or if
    it is torch's, whose order follows from a seed that every state has.
    """
    for each in nested_samplers(index_sampler):
        if hasattr(each, "start_at") or type(each) is DistributedSampler:
            return False
    return num_ranks(index_sampler) == 1


def differing_order(saved: Sequence[int | str], here: LastIndices, samplers: list[Any]) -> str:
    """Return what is wrong if a sampler does not give the indices that it gave; "" = nothing."""
    known = min(len(saved), len(here))
    if not known or tuple(saved[-known:]) == here[-known:]:
        return ""
    names = " of ".join(dict.fromkeys(type(each).__name__ for each in samplers))
    keeper = keeper_of_unknown_epoch(samplers[0])
    if keeper is not None:
        return (
            f"load_state_dict: sampler_epoch: the sampler ({names}) gives other indices than it "
            f"gave before this position: {_told(here[-known:])} in place of "
            f"{_told(saved[-known:])}. It is probably in another epoch: the state lacks the "
            f"number, since {type(keeper).__name__} does not keep what its set_epoch() is given in "
            "an attribute named epoch. Call set_epoch() with that number between load_state_dict() "
            "and iter(), and set self.epoch in set_epoch(), so that states have it."
        )
    return (
        f"load_state_dict: last_indices: the sampler ({names}) gives other indices than it gave "
        f"before this position: {_told(here[-known:])} in place of {_told(saved[-known:])}. In "
        "another order samples would be lost, or come twice. If nothing else was changed, it draws "
        "from what no state has, such as random, numpy or a generator that it makes: let it seed "
        "that by the number given to set_epoch(), draw from a torch.Generator that is its "
        "attribute generator, or have state_dict() and load_state_dict(state). Or another thread "
        "drew from torch's global generator when that epoch began: pass generator=."
    )


_BATCHES = (list, tuple, np.ndarray, torch.Tensor)


def _plain(index: Any) -> int | str:
    try:
        return operator.index(index)
    except Exception:  # no number, or one of the user's whose method fails
        return _text_of(index)[:_MOST_CHARACTERS]


def _told(indices: Sequence[int | str]) -> str:
    return f"[{', '.join(map(str, indices))}]"


_MOST_VALUES = 64
"""The most entries of a list, or characters, that are read of an index."""
_MOST_NUMBERS = 8
"""The most numbers of an array or tensor that are read of an index."""
_MOST_DEEP = 4
_NUMBERS = (bool, int, float, complex, type(None), np.generic)


def _text_of(value: Any, depth: int = 0) -> str:
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
        return f"[{', '.join(_text_of(each, depth + 1) for each in value[:_MOST_VALUES])}]"
    return type(value).__name__
