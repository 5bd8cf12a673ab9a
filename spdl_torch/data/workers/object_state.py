"""How objects keep their state, as a copy of it has to."""

from __future__ import annotations

import collections
import functools
import io
import types
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import Dataset

# Written in C, and copied as pickle would: their contents are visible.
_SEEN_THROUGH = (
    *(collections.deque, collections.OrderedDict, collections.defaultdict),
    *(types.SimpleNamespace, io.BytesIO, io.StringIO),
)

# Values, rather than owners of attributes that are private or shared one by one.
_PARTS = (
    *(list, dict, tuple, set, np.ndarray, torch.Tensor),
    *(functools.partial, types.FunctionType, types.MethodType, type),
)


def attributes_of_copy(own: Any) -> dict[str, Any]:
    """Return a copy's attributes, in its own dictionary: where ``__getstate__`` returns
    ``self.__dict__`` and ``__setstate__`` assigns it, copy and original would share one.
    """
    if not hasattr(own, "__dict__"):
        return {}
    attributes = cast("dict[str, Any]", vars(own))
    if type(attributes) is dict:
        attributes = dict(attributes)
        object.__setattr__(own, "__dict__", attributes)  # past a __setattr__ of the class
    return attributes


def has_own_attributes(value: Any) -> bool:
    """Return whether a value is an object of a class with attributes, and not a container."""
    if isinstance(value, Dataset):
        return True
    return hasattr(value, "__dict__") and not isinstance(value, _PARTS)


def is_seen_through(kind: type) -> bool:
    """Return whether pickle takes objects of this type apart by Python's own means, or the
    user's: what C code returns may be large, and is unknown."""
    for name in ("__reduce_ex__", "__reduce__", "__getstate__"):
        method = getattr(kind, name, None)
        if method in (None, getattr(object, name, None)):
            continue
        if isinstance(method, types.FunctionType):
            continue
        if getattr(method, "__objclass__", None) not in _SEEN_THROUGH:
            return False
    return True


def can_be_written(array: Any) -> bool:
    """Return whether an array's memory can be written through it, or through what it views."""
    while isinstance(array, np.ndarray):
        if array.flags.writeable:
            return True
        array = array.base
    return not isinstance(array, bytes | type(None))


def bytes_in(state: Any) -> int:
    """Return the size in bytes of a state that was just made."""
    values = state.values() if type(state) is dict else state
    if type(values) not in (list, tuple) and type(state) is not dict:
        return len(state) if isinstance(state, bytes) else 0
    return sum(len(each) for each in values if type(each) is bytes)
