"""What an object is and leads to: the table of types; its members, in one step and in all; the
datasets in a dataset.

Of the user's code, only ``__getattr__`` may run, for slots that are not set, and ``dataset``, which
torch's Subset and its kin have, where that is a property.
"""

from __future__ import annotations

import datetime
import enum
import functools
import gc
import inspect
import logging
import operator
import pathlib
import random
import re
import types
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, get_args

import numpy as np
import torch

from ..handlers import unless_of_handler

# Types: whose objects cannot change, which hold others, which draw numbers, which are memory.

PLAIN_VALUES = frozenset(
    {
        *(bool, int, float, complex, str, bytes, type(None), range, slice),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
    }
)
"""Data that cannot change. Of these very types: a subclass may run code and keep something."""
_VALUES = PLAIN_VALUES | {
    *(type(Ellipsis), type(NotImplemented), re.Pattern, re.Match, types.GenericAlias),
    *(datetime.timedelta, datetime.timezone, uuid.UUID),
}
_VALUES_BY_NAME = {("decimal", "Decimal"), ("fractions", "Fraction")}
"""Values as well; few programs have any, and both modules take long to import."""
_VALUE_BASES = (
    *(int, float, complex, str, bytes, enum.Enum, pathlib.PurePath),
    *(datetime.date, datetime.time, np.generic, np.dtype),
)
# It may refer to what changes, but is the same for all who use it. A function is not here: the
# variables around it may be one user's own.
_CODE = frozenset(
    {
        *(property, weakref.ref, types.CodeType, types.ModuleType, types.MappingProxyType),
        *(types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType),
        *(np.ufunc, type(functools.lru_cache(len))),
        *(operator.attrgetter, operator.itemgetter, operator.methodcaller),
    }
)
_CODE_BASES = (type, logging.Logger)

ARRAYS = (np.ndarray, torch.Tensor, bytearray)
"""Memory that can be written. Arrays of objects hold others as a list does."""
SEQUENCES = (list, tuple, set, frozenset, deque)
"""Containers other than dictionaries."""
Generator = (
    random.Random
    | np.random.Generator
    | np.random.RandomState
    | np.random.BitGenerator
    | torch.Generator
)
GENERATORS = get_args(Generator)
"""What draws random numbers."""


def _is_value(kind: type) -> bool:
    if kind in _VALUES or issubclass(kind, _VALUE_BASES):
        return True
    return (kind.__module__, kind.__qualname__) in _VALUES_BY_NAME


def _is_immutable(kind: type) -> bool:
    return is_value(kind) or kind in _CODE or issubclass(kind, _CODE_BASES)


is_value: Callable[[type], bool] = functools.lru_cache(maxsize=4096)(_is_value)
"""Return whether objects of a type are values that cannot change."""
is_immutable: Callable[[type], bool] = functools.lru_cache(maxsize=4096)(_is_immutable)
"""Return whether objects of a type cannot change, or are code. It is asked for every object."""


def is_memory(tensor: torch.Tensor) -> bool:
    """Return whether shape, strides, type and memory describe a tensor completely."""
    return (
        tensor.layout is torch.strided
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_nested)
        and not (tensor.is_conj() or tensor.is_neg() or tensor.__dict__)
    )


def is_plain_tensor(tensor: torch.Tensor) -> bool:
    """Return whether it is torch's own and, as ``is_memory`` says, memory, that of the CPU."""
    return type(tensor) is torch.Tensor and tensor.device.type == "cpu" and is_memory(tensor)


_CONTAINERS = (dict, *SEQUENCES)
_ON_HEAP = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class written in Python


def slots_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an object that lie in its ``__slots__``."""
    state = object.__getstate__(value)
    return state[1] if isinstance(state, tuple) else {}


def is_leaf(value: Any) -> bool:
    """Return whether a value has no members: it cannot change, or is a plain array."""
    kind = type(value)
    return _is_leaf(kind) and not (issubclass(kind, np.ndarray) and value.dtype.hasobject)


def _has_no_members(kind: type) -> bool:
    return is_immutable(kind) or issubclass(kind, ARRAYS)


_is_leaf: Callable[[type], bool] = functools.lru_cache(maxsize=4096)(_has_no_members)


def _own_state(value: Any) -> Any:
    """Return an object's attributes as ``__getstate__`` does, past that of its class."""
    if type(value).__flags__ & _ON_HEAP:
        return object.__getstate__(value)
    return getattr(value, "__dict__", None)  # C's have no slots, which Python would look for: 4 µs


def members(value: Any, *, most: int | None = None) -> Iterable[Any]:
    """Return what a value holds, in the order in which it keeps them.

    most: the most entries of a container that is entered; a longer one holds data.
    """
    if is_leaf(value):
        return ()
    kind = type(value)
    own_type = _container_of(kind)
    if own_type is not None:
        size = own_type.__len__(value)
        held = _entries(value, own_type) if size and (most is None or size <= most) else ()
        state = None if kind is own_type else _own_state(value)
        return chain(held, _attributes(state)) if state else held
    if isinstance(value, np.ndarray):
        return () if most is not None and value.size > most else value.flat
    if isinstance(value, types.FunctionType):
        return ()
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    return _attributes(_own_state(value))


def _python_type_of(kind: type) -> Any:
    return next((each for each in _CONTAINERS if issubclass(kind, each)), None)


_container_of: Callable[[type], Any] = functools.lru_cache(maxsize=4096)(_python_type_of)
"""Return which of Python's containers a type is made of; None = of none."""


def _entries(value: Any, own_type: Any) -> list[Any]:
    """Return what a container holds, at once, as other threads may add some, and by its own type's
    means: a subclass may have others."""
    if own_type is dict:
        return [*dict.values(value), *dict.keys(value)]
    return list(value if type(value) is own_type else own_type.__iter__(value))


def _attributes(state: Any) -> Iterator[Any]:
    """Yield the attributes in a state: a dictionary or a pair, the slots' in the second."""
    for each in state if isinstance(state, tuple) else (state,):
        if isinstance(each, dict):
            yield from (held for name, held in list(each.items()) if isinstance(name, str))


class Unfinished(Exception):
    """Raised at the end of a walk that has reached its bound."""


def walk(
    roots: Iterable[Any],
    members_of: Callable[[Any], Iterable[Any]],
    most: int,
    *,
    values: bool = False,
) -> Iterator[Any]:
    """Yield all that some roots lead to, each object once, breadth first: before its members are
    asked for. An object whose members cannot be had has none.

    values: yield values that cannot change, too.
    Raises: Unfinished: after a level in which the number of objects has reached ``most``, which
        leaves out the deepest.
    """
    seen: dict[int, Any] = {}  # alive, so that no other object gets an id
    level = list(roots)
    while level:
        if len(seen) >= most:
            raise Unfinished
        below: list[Any] = []
        for value in level:
            if id(value) in seen:
                continue
            seen[id(value)] = value
            yield value
            try:
                below += [each for each in members_of(value) if values or not is_value(type(each))]
            except unless_of_handler(Exception):  # a user's class that cannot be inspected
                continue
        level = below


def reachable(roots: Iterable[Any], most: int, longest: int | None = None) -> Iterator[Any]:
    """Yield all that ``walk`` would, and perhaps more, but for functions and what
    cannot change.

    Only the garbage collector is asked. The names of attributes are in ``__dict__``, which Python
    3.11 and 3.12 make when it is asked for; from then on they read an object's attributes more
    slowly: samples like ``self.x[i:j], self.y[i:j]`` take 6 % more instructions.

    longest: the most entries of a container that is entered.
    Raises: Unfinished: when it has entered ``most`` objects. Types' and attributes' dictionaries
        count, too.
    """
    seen: dict[int, Any] = {}
    waiting, num_entered = list(roots), 0
    while waiting:
        value = waiting.pop()
        kind = type(value)
        if is_immutable(kind) or id(value) in seen or kind is types.FunctionType:
            continue
        if num_entered > most:
            raise Unfinished
        seen[id(value)] = value
        yield value
        if not is_leaf(value):
            num_entered += 1
            waiting += _referents(value, kind, longest)


def _referents(value: Any, kind: type, longest: int | None) -> list[Any]:
    own_type = _container_of(kind)
    is_long = own_type is not None and longest is not None and own_type.__len__(value) > longest
    if is_long or issubclass(kind, np.ndarray):
        return list(members(value, most=longest))
    held = gc.get_referents(value)
    if kind is not own_type:
        dicts = [each for each in held if type(each) is dict]
        if len(dicts) == 1:  # perhaps its __dict__, of any length
            held += dicts[0].values()
    return held


# The datasets inside a dataset. Bounds, should one contain itself.
_MOST = 8
_MOST_DATASETS = 1000


def nested_datasets(dataset: Any) -> Iterator[Any]:
    """Yield the dataset and those inside it, from the outside in."""
    for _ in range(_MOST):
        yield dataset
        try:
            inner = getattr(dataset, "dataset", None)
        except unless_of_handler(Exception):  # the user's property fails; torch would not read it
            return
        if inner is None or inner is dataset:
            return
        dataset = inner


def all_datasets(dataset: Any) -> Iterator[Any]:
    """Yield the dataset, those inside it, and those that it mixes or concatenates."""
    left, number = [dataset], 0
    while left and number < _MOST_DATASETS:
        for each in nested_datasets(left.pop(0)):
            yield each
            number += 1
            several = _own_attribute(each, "datasets")
            if isinstance(several, dict):
                left += several.values()
            elif isinstance(several, list | tuple):
                left += several


def _own_attribute(value: Any, name: str) -> Any:
    """Return an attribute that is the object's own, without calling user code; None = no such.

    Like ``vars(value).get(name)``, but that would create the object's ``__dict__``: from then on
    Python 3.11 and 3.12 read its attributes more slowly.
    """
    if inspect.isdatadescriptor(getattr(type(value), name, None)):  # a property
        return None
    try:
        return object.__getattribute__(value, name)
    except AttributeError:  # __getattr__ is not asked
        return None
