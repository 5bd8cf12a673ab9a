"""Recognise what threads may share without a word of the user's: datasets that are lists and arrays
of nothing but data, and the libraries' functions, which keep no state from one sample to the next.

Nothing of the user's code runs here.
"""

from __future__ import annotations

import sys
import types
from collections import OrderedDict
from enum import Enum
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..objects.kinds import PLAIN_VALUES
from ..objects.members import Unfinished, members, walk

if TYPE_CHECKING:
    from collections.abc import Iterable

CONTAINERS = (list, tuple, range, np.ndarray, torch.Tensor)

_MOST_OBJECTS = 2_000_000
"""The most objects that are examined, at 15 to 50 ns each."""
_SEQUENCES = (list, tuple, set, frozenset)
_VALUES = PLAIN_VALUES | {np.ndarray, np.memmap, torch.Tensor, dict, *_SEQUENCES}

_MOST_PARTS = 10_000  # of a function
_PARTS = PLAIN_VALUES | {torch.Tensor, dict, OrderedDict, *_SEQUENCES}
_LIBRARIES = ("torch", "torchvision", "spdl_torch")


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
        if not all(map(_is_data, kinds)):
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


def _is_data(kind: type) -> bool:
    return kind in _VALUES or issubclass(kind, np.generic) or _is_named_tuple(kind)


def _is_named_tuple(kind: type) -> bool:
    """Return whether a type is a namedtuple whose entries are looked up like any tuple's."""
    own = (kind.__getitem__, kind.__iter__) if issubclass(kind, tuple) else ()
    return hasattr(kind, "_fields") and own == (tuple.__getitem__, tuple.__iter__)


def is_stateless(function: Any) -> bool:
    """Return whether a transform or loader is None, or torchvision's, ours, or an exact
    ``nn.Sequential``, and holds nothing but the same and data: no function of the user's, not even
    as a hook or an argument.
    """
    try:
        found = walk([("", function)], members, _MOST_PARTS, values=True)
        return all(_keeps_nothing(each) for _, each in found)
    except Unfinished:
        return False


def _keeps_nothing(value: Any) -> bool:
    kind = type(value)
    if kind is np.ndarray:
        return not value.dtype.hasobject
    if isinstance(value, type | types.FunctionType):
        return _is_libraries(value)
    if isinstance(value, Enum):
        return _is_libraries(kind)
    return kind in _PARTS or issubclass(kind, np.generic) or _is_transform(kind)


def _is_transform(kind: type) -> bool:
    if kind is torch.nn.Sequential:
        return True
    is_ours = kind.__module__ == "spdl_torch.nn"
    return (is_ours or kind.__module__.startswith("torchvision.transforms.")) and _is_libraries(
        kind
    )


def _is_libraries(value: Any) -> bool:
    """Return whether a library has this very class or function under its name: a wrapper, such as
    ``lru_cache``, has that name but is another object.
    """
    module = str(value.__module__)  # of a function that was made by hand it may be None
    if module.partition(".")[0] not in _LIBRARIES:
        return False
    return getattr(sys.modules.get(module), value.__qualname__, None) is value
