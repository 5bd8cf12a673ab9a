"""Batches as trees: dicts, lists, tuples, named tuples and dataclasses with tensors in them."""

from __future__ import annotations

import copy
from array import array
from collections import UserString
from collections.abc import Callable, Mapping, MutableMapping, MutableSequence, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

__all__ = ["map_leaves"]

Leaf = Callable[[Any], Any]

# Some are sequences, but of nothing that could be moved: visiting each byte of 200 kB would hold
# the GIL for 0.15 s.
_ATOMS = (str, UserString, bytes, bytearray, memoryview, array, range, int, float)


def map_leaves(batch: Any, function: Leaf) -> Any:
    """Apply ``function`` to every tensor of ``batch`` and to every object that moves itself.

    An object moves itself if it has a ``to`` method, as PyTorch's ``PackedSequence`` and PyG's
    graphs do; mappings that have one are walked all the same. Containers keep their class, and
    attributes besides their members are kept too. Parts in which nothing changed are the same
    objects in the result, as are strings, numbers and arrays.
    """
    if isinstance(batch, Tensor):
        return function(batch)
    if batch is None or isinstance(batch, _ATOMS):
        return batch
    moves_itself = callable(getattr(batch, "to", None)) and not isinstance(batch, type)
    if moves_itself and hasattr(batch, "pin_memory"):
        return function(batch)
    if isinstance(batch, Mapping):
        return _map_mapping(batch, function)
    if moves_itself:
        return function(batch)
    if isinstance(batch, Sequence):
        return _map_sequence(batch, function)
    if is_dataclass(batch) and not isinstance(batch, type):
        return _map_dataclass(batch, function)
    return batch


def _map_mapping(batch: Mapping[Any, Any], function: Leaf) -> Mapping[Any, Any]:
    changed = _changed(batch.items(), function)
    if not changed:
        return batch
    try:
        if isinstance(batch, MutableMapping):
            clone = copy.copy(batch)  # keeps a default factory, attributes, the order of the keys
            clone.update(changed)
            return clone
        return type(batch)({**batch, **changed})  # type: ignore[call-arg]  # or a TypeError
    except TypeError:  # cannot be copied, or made from a dict
        return {**batch, **changed}


def _map_sequence(batch: Sequence[Any], function: Leaf) -> Sequence[Any]:
    changed = _changed(enumerate(batch), function)
    if not changed:
        return batch
    members = list(batch)
    for place, value in changed.items():
        members[place] = value
    if type(batch) is list:
        return members
    try:
        if hasattr(batch, "_fields"):  # a named tuple
            return type(batch)(*members)
        if isinstance(batch, MutableSequence):
            clone = copy.copy(batch)
            for place, value in changed.items():
                clone[place] = value
            return clone
        return type(batch)(members)  # type: ignore[call-arg]  # or a TypeError
    except TypeError:
        return members


def _map_dataclass(batch: Any, function: Leaf) -> Any:
    there = ((f.name, getattr(batch, f.name)) for f in fields(batch) if hasattr(batch, f.name))
    changed = _changed(there, function)
    if not changed:
        return batch
    clone = copy.copy(batch)  # not built anew: __post_init__ has run, and may want other arguments
    for name, value in changed.items():
        object.__setattr__(clone, name, value)  # also where the class is frozen
    return clone


def _changed(members: Any, function: Leaf) -> dict[Any, Any]:
    return {
        key: mapped
        for key, value in members
        if (mapped := map_leaves(value, function)) is not value
    }
