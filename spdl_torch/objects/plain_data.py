"""Recognise datasets that are lists and arrays of nothing but data, without any user code."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .kinds import PLAIN_VALUES

if TYPE_CHECKING:
    from collections.abc import Iterable

CONTAINERS = (list, tuple, range, np.ndarray, torch.Tensor)

_MOST_OBJECTS = 2_000_000
"""The most objects that are examined, at 15 to 50 ns each."""
_VALUES = PLAIN_VALUES | {np.ndarray, np.memmap, torch.Tensor}
_SEQUENCES = (list, tuple, set, frozenset)


def is_plain_data(dataset: Any) -> bool:
    """Return whether a container holds nothing but numbers, strings, arrays, tensors and plain
    containers of these. Looking any of them up then runs no code that could keep state.
    """
    groups = _groups([dataset], {type(dataset)})
    num_seen = 0
    while groups:
        kind, values = groups.pop()
        num_seen += sum(map(len, values))
        if num_seen > _MOST_OBJECTS:  # before a look at any of them
            return False
        kinds = set(map(type, _members(kind, values)))  # in C, and without a list of them all
        if not all(map(_is_known, kinds)):
            return False
        if any(map(_may_hold_objects, kinds)):
            groups += _groups(list(_members(kind, values)), kinds)
    return True


def _groups(values: list[Any], kinds: set[type]) -> list[tuple[type, list[Any]]]:
    """Return the containers among the values, by type; arrays of objects are lists of these."""
    found = []
    for kind in filter(_may_hold_objects, kinds):
        same: list[Any] = [value for value in values if type(value) is kind]
        if kind is np.ndarray:
            same = [each.ravel().tolist() for each in same if each.dtype.hasobject]
        found.append((list if kind is np.ndarray else kind, same))
    return found


def _members(kind: type, values: list[Any]) -> Iterable[Any]:
    """Return what containers of one type hold."""
    if kind is dict:
        return chain(chain.from_iterable(values), chain.from_iterable(map(dict.values, values)))
    return chain.from_iterable(values)


def _may_hold_objects(kind: type) -> bool:
    return kind in _SEQUENCES or kind in (dict, np.ndarray) or _is_named_tuple(kind)


def _is_known(kind: type) -> bool:
    if kind in _VALUES or kind in _SEQUENCES or kind is dict:
        return True
    return issubclass(kind, np.generic) or _is_named_tuple(kind)


def _is_named_tuple(kind: type) -> bool:
    """Return whether a type is a namedtuple whose entries are looked up like any tuple's."""
    own = (kind.__getitem__, kind.__iter__) if issubclass(kind, tuple) else ()
    return hasattr(kind, "_fields") and own == (tuple.__getitem__, tuple.__iter__)
