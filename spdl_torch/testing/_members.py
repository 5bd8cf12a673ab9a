"""Walk from user code to what it uses, one step at a time, and tell what of that has changed."""

from __future__ import annotations

import functools
import io
import mmap
import sys
import types
import zlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..objects.kinds import SEQUENCES
from ..objects.members import members, text_of

if TYPE_CHECKING:
    from ..objects.members import Step

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
        """The beginning of each one's text: ``the global module``."""
        return f"the global {self.module.get('__name__')}"

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


def members_and_code(value: Any) -> Iterable[tuple[Step, Any]]:
    """Return what ``value`` holds, with the step to each: of a function its closure and defaults,
    of a class its data, of a scope the globals."""
    if isinstance(value, Scope):
        return value.values().items()
    if isinstance(value, type):
        return _data_of_class(value)
    return members(value, most=_MOST_MEMBERS, code=True)


def state(path: str, value: Any) -> dict[str, Any] | None:
    """Return what can be seen to change in ``value`` itself, by name; None: nothing can."""
    if isinstance(value, np.ndarray | torch.Tensor | bytearray | io.BytesIO):
        return {f"the contents of {path}": _checksum(value)}
    if isinstance(value, io.IOBase | mmap.mmap):
        return {f"the position of {path}": None if value.closed else _position(value)}
    if isinstance(value, SEQUENCES):
        entries = value if len(value) <= _MOST_ENTRIES else ()
        return {path: (len(value), *entries)}
    if isinstance(value, dict) and len(value) <= _MOST_ENTRIES:
        return {f"{path}[{key!r}]": each for key, each in value.items()}
    if isinstance(value, functools._lru_cache_wrapper):
        return {f"the cache of {path}": value.cache_info().currsize}
    if isinstance(value, Iterator) and not hasattr(value, "__dict__"):
        return None
    found = members_and_code(value)
    held = {text_of(((None, path, 0), step, 1)): each for step, each in found}
    return held if held or hasattr(value, "__dict__") else None


_CODE = (types.FunctionType, classmethod, staticmethod, property, types.GetSetDescriptorType)


def _data_of_class(kind: type) -> Iterator[tuple[str, Any]]:
    if not is_users(kind):
        return
    for name, each in vars(kind).items():
        is_code = isinstance(each, (*_CODE, types.MemberDescriptorType))
        if not (is_code or name.startswith(("__", "_abc_"))):
            yield name, each


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
