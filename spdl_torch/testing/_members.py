"""Walk from user code to what it uses, one step at a time, and tell what of that has changed."""

from __future__ import annotations

import collections
import functools
import io
import mmap
import sys
import threading
import types
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..loader.backends.dataset_copies import own_copy, own_function
from ..locks import RLock
from ..objects.kinds import GENERATORS, SEQUENCES, is_immutable, is_value
from ..objects.members import Unfinished, members, text_of, walk

if TYPE_CHECKING:
    from ..objects.members import Step, Way


_MOST_MEMBERS = 256
"""The most members of a container that are looked into; a longer one holds data."""
_MOST_OBJECTS = 5_000
_MOST_ENTRIES = 100_000
_MOST_BYTES = 1 << 26
_OURS = {"torch", "torchvision", "numpy", "spdl_torch"}
_PYTHONS = sys.stdlib_module_names - {"__main__"}


def is_library(module: str) -> bool:
    """Return whether a module's name is one of Python's, torch's or ours."""
    return is_ours(module) or module.partition(".")[0] in _PYTHONS


def is_ours(module: str) -> bool:
    """Return whether it is one of the modules that every loader is made of."""
    return module.partition(".")[0] in _OURS


def members_and_code(value: Any, most: int = _MOST_MEMBERS) -> Iterable[tuple[Step, Any]]:
    """Return what ``value`` holds, with the step to each: of a function the variables around it and
    its defaults, of a class nothing."""
    return () if isinstance(value, type) else members(value, most=most, code=True)


def reached(roots: Iterable[tuple[str, Any]], most: int = _MOST_MEMBERS) -> list[tuple[Way, Any]]:
    """Return all that some roots lead to, but for what cannot change."""
    found: list[tuple[Way, Any]] = []
    with suppress(Unfinished):
        found.extend(walk(roots, partial(members_and_code, most=most), _MOST_OBJECTS))
    return found


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


_SMALL = 16  # members of a container that may be a stack or a mailbox
_HARMLESS = (
    *(types.FunctionType, types.MethodType),
    *(type(threading.Lock()), type(threading.RLock()), threading.local),
)


class SharedObjects:
    """The objects that two workers' copies both lead to, in their state when this is made."""

    def __init__(self, dataset: Any, functions: Sequence[Callable[..., Any] | None]) -> None:
        self._found: dict[str, Any] = {}
        self.changed: dict[str, None] = {}
        """The names of what had changed at any look."""
        turn = RLock()
        # Two workers share what both of their copies lead to.
        first, second = (reached(_of_worker(dataset, functions, turn)) for _ in range(2))
        theirs = {id(value) for _, value in second}
        for path, value in first:
            if id(value) in theirs and not isinstance(value, GENERATORS):  # the loader seeds those
                self._found[text_of(path)] = value
        self._states = {path: state(path, value) for path, value in self._found.items()}

    def look(self) -> None:
        """Note what differs now. Look often: a shuffled list may be in order again later."""
        for path, value in self._found.items():
            before, after = self._states[path], state(path, value)
            if before is not None and after is not None:
                for key in {**before, **after}:
                    if not _same(before.get(key, _NOTHING), after.get(key, _NOTHING)):
                        self.changed[key] = None

    def written(self) -> list[str]:
        """Name the tensors and arrays whose contents had changed at any look."""
        return [name for name in self.changed if name.startswith("the contents of ")]

    def suspects(self) -> list[str]:
        """Name, with their types, the shared objects that cannot be looked into, and small
        containers, which may be unchanged again by the time they are looked at.
        """
        return [
            f"{path} ({type(value).__name__})"
            for path, value in self._found.items()
            if (isinstance(value, list | dict | set | collections.deque) and len(value) <= _SMALL)
            or (
                self._states[path] is None
                and not (is_immutable(type(value)) or isinstance(value, _HARMLESS))
            )
        ]


def _of_worker(
    dataset: Any, functions: Sequence[Callable[..., Any] | None], turn: RLock
) -> list[tuple[str, Any]]:
    """Return a worker's own dataset, ``collate_fn`` and ``worker_init_fn``, by name."""
    own = own_copy(dataset, turn)
    named = zip(("collate_fn", "worker_init_fn"), functions, strict=True)
    given = [
        (name, own_function(each, dataset, own, turn)) for name, each in named if each is not None
    ]
    return [("dataset", own), *given]


_NOTHING = object()


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, tuple) and isinstance(b, tuple):
        return a is b or (len(a) == len(b) and all(map(_same, a, b)))
    return a is b or (type(a) is type(b) and is_value(type(a)) and a == b)
