"""The members of an object, one step at a time, and how much of them can be seen to change."""

from __future__ import annotations

import collections
import enum
import functools
import io
import mmap
import pathlib
import re
import sys
import types
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from ..data.workers.object_state import slots_of

__all__ = ["PLAIN", "Scope", "is_library", "is_ours", "is_users", "members", "state"]

PLAIN = (
    *(str, bytes, int, float, complex, bool, type(None), range, enum.Enum),
    *(re.Pattern, pathlib.PurePath, torch.dtype, torch.device, torch.Size),
)
"""Types whose objects do not change."""
_MOST_MEMBERS = 256
"""The most members of a container that are looked into; a longer one holds data."""
_MOST_ENTRIES = 100_000
_MOST_BYTES = 1 << 26
_OURS = {"torch", "torchvision", "numpy", "spdl_torch"}
_PYTHONS = sys.stdlib_module_names - {"__main__"}


class Scope:
    """The names in a module that some code uses."""

    def __init__(self, module: dict[str, Any], names: set[str]) -> None:
        self.module = module
        self.names = names

    @property
    def name(self) -> str:
        return f"the globals of {self.module.get('__name__')}"

    def values(self) -> dict[str, Any]:
        return {name: self.module[name] for name in sorted(self.names) if name in self.module}


def is_users(value: Any) -> bool:
    """Return whether a class or function is the user's, not a library's."""
    return not is_library(str(getattr(value, "__module__", None) or "builtins"))


def is_library(module: str) -> bool:
    """Return whether a module's name is one of Python's, torch's or ours."""
    return is_ours(module) or module.partition(".")[0] in _PYTHONS


def is_ours(module: str) -> bool:
    """Return whether it is one of the modules that every loader is made of."""
    return module.partition(".")[0] in _OURS


def members(path: str, value: Any) -> dict[str, Any]:
    """Return what ``value`` holds, by the expression that leads there."""
    if isinstance(value, (*PLAIN, types.ModuleType, np.ndarray, torch.Tensor)):
        return {}
    if isinstance(value, Scope):
        module = value.module.get("__name__")
        return {f"the global {module}.{k}": each for k, each in value.values().items()}
    if isinstance(value, dict):
        return {f"{path}[{key!r}]": each for key, each in _few(value.items())}
    if isinstance(value, list | tuple | set | frozenset | collections.deque):
        return {f"{path}[{number}]": each for number, each in enumerate(_few(value))}
    if isinstance(value, functools.partial):
        parts = (value.func, *value.args, *value.keywords.values())
        return {f"{path} (part {number})": each for number, each in enumerate(parts)}
    if isinstance(value, types.MethodType):
        return {f"{path}.__self__": value.__self__, path: value.__func__}
    if isinstance(value, types.FunctionType):
        return _of_function(path, value)
    return {f"{path}.{name}": each for name, each in _attributes(value).items()}


def state(path: str, value: Any) -> dict[str, Any] | None:
    """Return what can be seen to change in ``value`` itself, by name; None: nothing can."""
    if isinstance(value, np.ndarray | torch.Tensor | bytearray | io.BytesIO):
        return {f"the contents of {path}": _checksum(value)}
    if isinstance(value, io.IOBase | mmap.mmap):
        return {f"the position of {path}": None if value.closed else _position(value)}
    if isinstance(value, list | tuple | set | frozenset | collections.deque):
        entries = value if len(value) <= _MOST_ENTRIES else ()
        return {path: (len(value), *entries)}
    if isinstance(value, dict) and len(value) <= _MOST_ENTRIES:
        return {f"{path}[{key!r}]": each for key, each in value.items()}
    if isinstance(value, functools._lru_cache_wrapper):
        return {f"the cache of {path}": value.cache_info().currsize}
    if isinstance(value, Iterator) and not hasattr(value, "__dict__"):
        return None
    held = members(path, value)
    return held if held or hasattr(value, "__dict__") else None


def _few(values: Any) -> list[Any]:
    return list(values) if len(values) <= _MOST_MEMBERS else []


def _of_function(path: str, function: types.FunctionType) -> dict[str, Any]:
    """Return a function's closure variables, and the defaults of its arguments."""
    names = function.__code__.co_freevars
    found = {}
    for name, cell in zip(names, function.__closure__ or (), strict=True):
        try:
            found[f"{name}, a variable around {path}"] = cell.cell_contents
        except ValueError:  # it has not been set
            continue
    code, defaults = function.__code__, function.__defaults__ or ()
    arguments = code.co_varnames[: code.co_argcount]
    named = dict(zip(arguments[len(arguments) - len(defaults) :], defaults, strict=True))
    for name, each in {**named, **(function.__kwdefaults__ or {})}.items():
        found[f"{name}, a default argument of {path}"] = each
    return found


_CODE = (types.FunctionType, classmethod, staticmethod, property, types.GetSetDescriptorType)


def _attributes(value: Any) -> dict[str, Any]:
    """Return an object's attributes or, of a class, those that hold data."""
    if isinstance(value, type):
        held = vars(value).items() if is_users(value) else ()
        return {
            name: each
            for name, each in held
            if not isinstance(each, (*_CODE, types.MemberDescriptorType))
            and (not name.startswith("__") and not name.startswith("_abc_"))
        }
    try:
        found = dict(vars(value))
    except Exception:  # it has no __dict__, or its class computes one and fails
        found = {}
    return {**found, **slots_of(value)}


def _checksum(value: Any) -> Any:
    """Return a number that changes with the contents; None: of a large array, or without bytes."""
    try:
        if isinstance(value, torch.Tensor | np.ndarray) and value.nbytes > _MOST_BYTES:
            return getattr(value, "_version", None)  # torch counts what changes a tensor in place
        if isinstance(value, torch.Tensor):
            value = value.detach().reshape(-1).view(torch.uint8).numpy()
        if isinstance(value, io.BytesIO):
            value = value.getvalue()
        if isinstance(value, np.ndarray):
            value = np.ascontiguousarray(value).view(np.uint8)
        return zlib.crc32(value)
    except Exception:  # object arrays, closed files, tensors that are not in this memory
        return None


def _position(file: Any) -> Any:
    try:
        return file.tell()
    except Exception:  # a pipe has none
        return None
