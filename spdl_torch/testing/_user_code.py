"""The functions that a dataset may call, and which parts of the process's state they use."""

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

_CALLS = {
    "os": ("getpid", "environ", "putenv", "chdir", "umask", "getppid"),
    "multiprocessing": ("current_process",),
    "torch": (
        *("set_default_dtype", "use_deterministic_algorithms", "set_num_threads"),
        *("set_sharing_strategy", "set_float32_matmul_precision", "set_printoptions"),
    ),
    "locale": ("setlocale",),
    "warnings": ("catch_warnings", "simplefilter", "filterwarnings"),
    "contextlib": ("redirect_stdout", "redirect_stderr"),
    "signal": ("signal", "setitimer", "alarm"),
    "socket": ("setdefaulttimeout",),
    "gc": ("disable", "enable", "freeze"),
    "logging": ("disable", "basicConfig"),
    "sys": ("setrecursionlimit", "stdout", "stderr"),
    "tempfile": ("tempdir",),
}


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

    def process_calls(self) -> list[str]:
        """Name the functions that use what belongs to the process, and what they use."""
        found: dict[str, None] = {}
        for function in self.functions:
            used = {name for code in _nested(function.__code__) for name in code.co_names}
            for module, names in _CALLS.items():
                imported = {n for n in names if _is_from(function.__globals__.get(n), module)}
                for name in sorted(used & (set(names) if module in used else imported)):
                    found[f"{function.__qualname__} uses {module}.{name}"] = None
        return list(found)

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


def _is_from(value: Any, module: str) -> bool:
    """Return whether a name was imported from a module of the table."""
    name = str(getattr(value, "__module__", "")).partition(".")[0]
    return name in (module, {"os": "posix", "signal": "_signal"}.get(module, module))
