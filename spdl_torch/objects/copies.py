"""Copies of users' objects: they never run the user's ``__del__``.

A copy refers to what its original refers to: its open file, its connection, its temporary folder.
If each of them ran ``__del__``, the first that dies would close it for all others. In a worker
process no such copy dies before the process does. So here: the finaliser runs once, on the
original, which lives as long as its copies do.

Python calls ``__del__`` of an object once, and notes that it did. A copy gets that note before it
has any state, while it belongs to a class whose ``__del__`` does nothing; then it is an object of
its own class again, whose type, ``super()`` and pickle are what they are.

A class that makes its copies by its own ``__copy__``, ``__deepcopy__`` or ``__reduce__`` can give
them a file of their own; they end as any other object.
"""

from __future__ import annotations

import copy
import copyreg
import ctypes
import functools
import types
import weakref
from collections.abc import Callable
from itertools import islice
from typing import Any, TypeVar, cast

_T = TypeVar("_T")

# Flags of a type: Python notes a call of __del__ for objects with the first alone. A class written
# in Python has the second, and not the third. C's own are left alone: a BytesIO has its memory.
_HAS_GC, _ON_HEAP, _IMMUTABLE = 1 << 14, 1 << 9, 1 << 8
_OWN_WAYS = ("__copy__", "__deepcopy__", "__reduce__", "__reduce_ex__")

_originals: dict[int, tuple[weakref.ref[Any], Any]] = {}
"""The originals of living copies, by the copies' ids."""


def shallow_copy(value: _T) -> _T:
    """Return ``copy.copy(value)``, which never runs ``__del__``."""
    if not _is_finalized(type(value)):
        return copy.copy(value)
    reduced: Any = value.__reduce_ex__(4)
    make, args, state, members, pairs = (*reduced, None, None, None)[:5]
    own: Any = _unfinalized(make(*args), value)
    if state is not None:
        _set_state(own, state)
    for each in members or ():
        own.append(each)
    for key, each in pairs or ():
        own[key] = each
    return cast("_T", own)


def deep_copy(value: Any, memo: dict[int, Any] | None = None) -> Any:
    """Return ``copy.deepcopy(value, memo)``, in which no copy runs ``__del__``. If it fails,
    ``memo`` has nothing of the copies that were not finished."""
    memo = {} if memo is None else memo
    num_known = len(memo)
    try:
        return copy.deepcopy(value, memo)
    except BaseException:
        _silence_new(memo, num_known)
        while len(memo) > num_known:
            memo.popitem()
        raise
    finally:
        _silence_new(memo, num_known)


def _silence_new(memo: dict[int, Any], num_known: int) -> None:
    """Silence the copies that ``copy.deepcopy`` has added to its memo, unfinished ones included."""
    originals = None
    for number, own in islice(reversed(memo.items()), len(memo) - num_known):
        if number != id(memo) and _is_finalized(type(own)):
            if originals is None:  # which deepcopy keeps alive
                originals = {id(each): each for each in memo.get(id(memo), ())}
            _unfinalized(own, originals.get(number))


def _unfinalized(own: Any, original: Any) -> Any:
    """Return ``own``, a new copy of ``original``, after making sure that it never runs ``__del__``
    and that the original outlives it."""
    kind = type(own)
    if not _is_finalized(kind):
        return own
    _set_class(own, _silent(kind))
    try:
        ctypes.pythonapi.PyObject_CallFinalizer(ctypes.py_object(own))
    finally:
        _set_class(own, kind)
    number = id(own)
    try:
        # The reference is pop's default. No line of Python runs there, where Ctrl-C might be lost.
        ref = weakref.ref(own, functools.partial(_originals.pop, number))
    except TypeError:  # a class with slots, and without one for weak references
        return own
    _originals[number] = ref, original
    return own


def _runs_del(kind: type) -> bool:
    """Return whether a copy of such an object, made without the help of its class, would run
    ``__del__``."""
    is_class = kind.__flags__ & (_HAS_GC | _ON_HEAP | _IMMUTABLE) == _HAS_GC | _ON_HEAP
    if not (is_class and hasattr(kind, "__del__")):
        return False
    ways = (getattr(kind, name, None) for name in _OWN_WAYS)
    has_own_way = any(isinstance(way, types.FunctionType) for way in ways)
    return not has_own_way and kind not in copyreg.dispatch_table


_is_finalized: Callable[[type], bool] = functools.lru_cache(maxsize=1024)(_runs_del)


class _Unannounced:
    """Comes before a class in a method resolution order, to be asked in its place."""

    __slots__ = ()

    def __init_subclass__(cls) -> None:
        pass


def _mro(cls: type) -> list[type]:
    return [cls, _Unannounced, *type.mro(cls)[1:]]


def _silent(kind: type) -> type:
    """Return a class whose objects are laid out like those of ``kind``, and end silently. Neither
    ``kind`` nor its metaclass, which may register classes, is told of it."""
    metaclass: Any = type("_Silent", (type(kind),), {"mro": _mro})
    members = {"__slots__": (), "__del__": lambda self: None}
    return cast("type", type.__new__(metaclass, kind.__name__, (kind,), members))


_class: Any = vars(object)["__class__"]  # past a property of the user's class


def _set_class(value: Any, kind: type) -> None:
    _class.__set__(value, kind)


def _set_state(own: Any, state: Any) -> None:
    """Give a new object its state, as pickle does."""
    if hasattr(own, "__setstate__"):
        own.__setstate__(state)
        return
    slots = None
    if isinstance(state, tuple) and len(state) == 2:
        state, slots = state
    if state:
        cast("dict[str, Any]", vars(own)).update(state)
    for name, value in (slots or {}).items():
        object.__setattr__(own, name, value)
