"""The state of objects: the ways in which they keep it, and the part that can change."""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import fractions
import functools
import io
import logging
import operator
import pathlib
import re
import types
import uuid
import weakref
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch.utils.data import Dataset

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "SHARED_MODULES",
    "attributes_of_copy",
    "bytes_in",
    "can_be_written",
    "has_contents",
    "has_own_attributes",
    "is_flat",
    "is_immutable",
    "is_memory",
    "is_ours",
    "is_seen_through",
    "slots_of",
]

_FEW = 16

_IMMUTABLE = frozenset(
    {
        *(bool, int, float, complex, str, bytes, type(None), type(Ellipsis), type(NotImplemented)),
        *(range, slice, type, property, weakref.ref, types.CodeType, types.ModuleType),
        *(types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType),
        *(np.ufunc, type(functools.lru_cache(len))),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
        *(operator.attrgetter, operator.itemgetter, operator.methodcaller),
        *(re.Pattern, re.Match, types.GenericAlias, types.MappingProxyType),
        *(datetime.timedelta, datetime.timezone, decimal.Decimal, fractions.Fraction, uuid.UUID),
    }
)
_IMMUTABLE_BASES = (
    *(int, float, str, bytes, type, enum.Enum, pathlib.PurePath, datetime.date, datetime.time),
    *(np.generic, np.dtype, logging.Logger),
)
# Written in C, and copied as pickle would: their contents are visible.
_SEEN_THROUGH = (
    *(collections.deque, collections.OrderedDict, collections.defaultdict),
    *(types.SimpleNamespace, io.BytesIO, io.StringIO),
)
# What threads use together by its nature.
SHARED_MODULES = (
    *("threading", "_thread", "queue", "_queue", "multiprocessing", "_multiprocessing"),
    *("asyncio", "concurrent", "contextvars", "_contextvars", "weakref"),
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


def _is_immutable(kind: type) -> bool:
    return kind in _IMMUTABLE or issubclass(kind, _IMMUTABLE_BASES)


is_immutable: Callable[[type], bool] = functools.lru_cache(maxsize=4096)(_is_immutable)
"""Return whether objects of a type cannot change, or are code. It is asked for every object."""


def is_flat(values: Any) -> bool:
    """Return whether all values are immutable, tuples of such included."""
    if len(values) <= _FEW:
        return all(map(is_immutable, map(type, values)))
    kinds = set(map(type, values))  # 15 ns each
    others = {kind for kind in kinds if not is_immutable(kind)}
    if others != {tuple}:
        return not others
    tuples = values if len(kinds) == 1 else (each for each in values if type(each) is tuple)
    return all(map(is_immutable, set(map(type, chain.from_iterable(tuples)))))


def has_own_attributes(value: Any) -> bool:
    """Return whether a value is an object of a class with attributes, and not a container."""
    if isinstance(value, Dataset):
        return True
    return hasattr(value, "__dict__") and not isinstance(value, _PARTS)


def slots_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an object that lie in its ``__slots__``."""
    found = {}
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                found[name] = getattr(value, name)
    return found


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


def is_ours(kind: type) -> bool:
    """Return whether a class is this package's."""
    return kind.__module__.startswith("spdl_torch.")


def has_contents(cell: types.CellType) -> bool:
    """Return whether a variable around a function has a value yet."""
    try:
        cell.cell_contents  # noqa: B018  # an empty one raises
    except ValueError:
        return False
    return True


def is_memory(tensor: torch.Tensor) -> bool:
    """Return whether shape, strides, type and memory describe a tensor completely."""
    return (
        tensor.layout is torch.strided
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_nested)
        and not (tensor.is_conj() or tensor.is_neg() or tensor.__dict__)
    )


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
