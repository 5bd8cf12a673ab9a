"""The functions and classes that a dataset may use, and the globals that they name."""

from __future__ import annotations

import dis
import functools
import types
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ..objects.members import Unfinished, walk
from ._members import Scope, is_users, members_and_code

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..objects.members import Step

_MOST = 5_000


class UserCode:
    """The user's functions and classes that can be reached from some objects, by reading code."""

    def __init__(self, *roots: Any) -> None:
        self.classes: list[type] = []
        self.functions: list[types.FunctionType] = []
        self._names: dict[int, Scope] = {}
        with suppress(Unfinished):
            for _ in walk([("", root) for root in roots], self._next, _MOST):
                pass

    @property
    def scopes(self) -> list[Scope]:
        """The globals that the functions use, of each module."""
        return list(self._names.values())

    def _next(self, value: Any) -> Iterator[tuple[Step, Any]]:
        """Yield what a function, class or object leads to, and keep functions and classes."""
        return (("", each) for each in self._led_to(value))

    def _led_to(self, value: Any) -> list[Any]:
        if isinstance(value, functools._lru_cache_wrapper | staticmethod | classmethod):
            value = value.__wrapped__
        if isinstance(value, property):
            return [value.fget, value.fset]
        if isinstance(value, types.FunctionType):
            if not is_users(value):
                return []
            self.functions.append(value)
            return [*_held_by(value), *self._used_by(value)]
        if isinstance(value, type):
            if not is_users(value):
                return []
            self.classes.append(value)
            return [*vars(value).values(), *value.__bases__]
        return [type(value), *_held_by(value)]

    def _used_by(self, function: types.FunctionType) -> Iterator[Any]:
        """Yield the globals that a function names; keep those that hold data."""
        module = function.__globals__
        scope = self._names.setdefault(id(module), Scope(module, set()))
        for code in _nested(function.__code__):
            for step in dis.get_instructions(code):
                if step.opname in ("LOAD_GLOBAL", "STORE_GLOBAL", "LOAD_NAME"):
                    name = str(step.argval)
                    value = module.get(name)
                    if isinstance(value, types.ModuleType):
                        yield from _named_in(value, code.co_names)
                    elif not isinstance(value, type | types.FunctionType):
                        scope.names.add(name)
                    yield value


def _held_by(value: Any) -> list[Any]:
    return [each for _, each in members_and_code(value)]


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a function's code and that of the functions within it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested(constant)


def _named_in(module: types.ModuleType, names: tuple[str, ...]) -> Iterator[Any]:
    """Yield what a user's module has under some names."""
    for name in names:
        value = vars(module).get(name)
        if isinstance(value, type | types.FunctionType):
            yield value
