"""Batches as trees: dicts, lists, tuples, named tuples and dataclasses with tensors in them."""

from __future__ import annotations

from array import array
from collections import UserString
from collections.abc import Callable, Iterable, Mapping, MutableMapping, MutableSequence, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from ...objects.copies import shallow_copy

# Some are sequences, but of nothing that could be moved: visiting each byte of 200 kB would hold
# the GIL for 0.15 s.
_ATOMS = (str, UserString, bytes, bytearray, memoryview, array, range, int, float)


class Leaf:
    """A tensor of a batch, or an object that moves itself."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


Spots = Leaf | dict[Any, "Spots"]
"""Where the leaves of a batch are: the keys that lead to them, and no others."""


def spots_of(batch: Any) -> Spots:
    """Return where the leaves of ``batch`` are: tensors, and objects that move themselves. Every
    member is visited.

    An object moves itself if it has a ``to`` method, as PyTorch's ``PackedSequence`` and PyG's
    graphs do; mappings that have one are walked all the same.
    """
    if is_leaf(batch):
        return Leaf(batch)
    if batch is None or isinstance(batch, _ATOMS):
        return {}
    return {key: spots for key, value in _members(batch) if (spots := spots_of(value))}


def is_leaf(value: Any) -> bool:
    """Return whether a value is a tensor, or an object that moves itself."""
    if isinstance(value, Tensor):
        return True
    if value is None or isinstance(value, (*_ATOMS, type)):
        return False
    moves_itself = callable(getattr(value, "to", None))
    return moves_itself and (hasattr(value, "pin_memory") or not isinstance(value, Mapping))


def leaves_of(spots: Spots) -> Iterable[Any]:
    """Yield the leaves, in their order."""
    if isinstance(spots, Leaf):
        yield spots.value
    else:
        for inner in spots.values():
            yield from leaves_of(inner)


def spots_where(spots: Spots, function: Callable[[Any], Leaf | None]) -> Spots:
    """Return the spots for which ``function`` returns a leaf: with that one in its place."""
    if isinstance(spots, Leaf):
        return function(spots.value) or {}
    return {key: found for key, inner in spots.items() if (found := spots_where(inner, function))}


def map_spots(batch: Any, spots: Spots, function: Callable[[Any], Any]) -> Any:
    """Apply ``function`` to every tensor of ``batch`` and to every object that moves itself, which
    are at ``spots``. No other member is visited.

    Containers keep their class, and attributes besides their members are kept too. Parts in which
    nothing changed are the same objects in the result.
    """
    if isinstance(spots, Leaf):
        return function(spots.value)
    changed = {}
    for key, inner in spots.items():
        value = inner.value if isinstance(inner, Leaf) else _member(batch, key)
        mapped = map_spots(value, inner, function)
        if mapped is not value:
            changed[key] = mapped
    return _with_members(batch, changed) if changed else batch


def _members(batch: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(batch, Mapping):
        return batch.items()
    if isinstance(batch, Sequence):
        return enumerate(batch)
    if is_dataclass(batch) and not isinstance(batch, type):
        return ((f.name, getattr(batch, f.name)) for f in fields(batch) if hasattr(batch, f.name))
    return ()


def _member(batch: Any, key: Any) -> Any:
    return batch[key] if isinstance(batch, Mapping | Sequence) else getattr(batch, key)


def _with_members(batch: Any, changed: dict[Any, Any]) -> Any:
    if isinstance(batch, Mapping):
        return _mapping_with(batch, changed)
    if isinstance(batch, Sequence):
        return _sequence_with(batch, changed)
    # Not built anew: __post_init__ has run, and may want other arguments.
    clone = shallow_copy(batch)
    for name, value in changed.items():
        object.__setattr__(clone, name, value)  # also where the class is frozen
    return clone


def _mapping_with(batch: Mapping[Any, Any], changed: dict[Any, Any]) -> Mapping[Any, Any]:
    try:
        if isinstance(batch, MutableMapping):
            # Keeps a default factory, attributes, the order of the keys.
            clone = shallow_copy(batch)
            clone.update(changed)
            return clone
        return type(batch)({**batch, **changed})  # type: ignore[call-arg]  # or a TypeError
    except TypeError:  # cannot be copied, or made from a dict
        return {**batch, **changed}


def _sequence_with(batch: Sequence[Any], changed: dict[int, Any]) -> Sequence[Any]:
    members = list(batch)
    for place, value in changed.items():
        members[place] = value
    if type(batch) is list:
        return members
    try:
        if hasattr(batch, "_fields"):  # a named tuple
            return type(batch)(*members)
        if isinstance(batch, MutableSequence):
            clone = shallow_copy(batch)
            for place, value in changed.items():
                clone[place] = value
            return clone
        return type(batch)(members)  # type: ignore[call-arg]  # or a TypeError
    except TypeError:
        return members
