"""Copies of users' objects, in which what has a ``__del__`` is the object itself.

A copy refers to what its original refers to: its open file, its connection, its temporary folder.
If each of them ran ``__del__``, the first that dies would close it for all others. A class that
makes its copies by its own ``__copy__``, ``__deepcopy__`` or ``__reduce__`` can give them a file of
their own: it is copied.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from .members import Unfinished, members, walk

_T = TypeVar("_T")

_MOST_OBJECTS = 1_000_000
_OWN_WAYS = ("__copy__", "__deepcopy__", "__reduce__", "__reduce_ex__")
# Flags of a type: that of a class that is written in Python, and that of one which is not.
_ON_HEAP, _IMMUTABLE = 1 << 9, 1 << 8


def shallow_copy(value: _T) -> _T:
    """Return ``copy.copy(value)``, or the object itself if it would run ``__del__``."""
    return value if _is_finalized(type(value)) else copy.copy(value)


def deep_copy(value: Any, memo: dict[int, Any] | None = None) -> Any:
    """Return ``copy.deepcopy(value, memo)``, in which objects with ``__del__`` are themselves. If
    it fails, ``memo`` has nothing of the copies that were not finished."""
    memo = {} if memo is None else memo
    with suppress(Unfinished):  # what lies so deep is copied
        for _, each in walk([("", value)], members, _MOST_OBJECTS):
            if _is_finalized(type(each)):
                memo.setdefault(id(each), each)
    num_known = len(memo)
    try:
        return copy.deepcopy(value, memo)
    except BaseException:
        while len(memo) > num_known:
            memo.popitem()
        raise


def _runs_del(kind: type) -> bool:
    """Return whether a copy of such an object, made without the help of its class, would run
    ``__del__``."""
    is_class = kind.__flags__ & (_ON_HEAP | _IMMUTABLE) == _ON_HEAP
    ways = (getattr(kind, name, None) for name in _OWN_WAYS)
    has_own_way = any(isinstance(way, types.FunctionType) for way in ways)
    return is_class and hasattr(kind, "__del__") and not has_own_way


_is_finalized: Callable[[type], bool] = functools.lru_cache(maxsize=1024)(_runs_del)
