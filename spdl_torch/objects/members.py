"""The members of an object: what it leads to in one step, and all that it leads to.

Of the user's code, only ``__getattr__`` may run, for slots that are not set.
"""

from __future__ import annotations

import functools
import gc
import types
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import numpy as np

from ..handlers import unless_of_handler
from .kinds import ARRAYS, SEQUENCES, is_immutable, is_value

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
