"""What loading changes: in the objects that user code leads to, found one step at a time, and in
the state that all threads of a process share: working directory, environment, settings."""

from __future__ import annotations

import collections
import functools
import gc
import io
import locale
import logging
import mmap
import os
import signal
import socket
import sys
import tempfile
import threading
import types
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..loader.backends.dataset_copies import own_copy, own_function
from ..locks import RLock
from ..objects.generator_states import generators_kept
from ..objects.kinds import GENERATORS, SEQUENCES, is_immutable, is_value
from ..objects.members import Unfinished, members, text_of, walk
from ..scopes import scope
from ..shown_text import short_repr

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


def is_large(value: Any) -> bool:
    """Return whether it is a tensor or an array that is neither read nor copied."""
    return isinstance(value, torch.Tensor | np.ndarray) and value.nbytes > _MOST_BYTES


def _checksum(value: Any) -> Any:
    """Return a number that changes with the contents; None: of a large array, or without bytes."""
    try:
        if is_large(value):
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
_LOCKS = (type(threading.Lock()), type(threading.RLock()))
_HARMLESS = (types.FunctionType, types.MethodType, threading.local, *_LOCKS)


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


@scope
def checking() -> Iterator[None]:
    """Restore the generators after the block, in which more threads than cores are wanted."""
    with generators_kept(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        yield


def _settings_now() -> dict[str, Any]:
    """Return the process's settings, by the expression that reads each."""
    return {name: read() for name, (read, _) in _SETTINGS.items()}


def changed_settings(before: dict[str, Any]) -> dict[str, str]:
    """Describe what differs from before, each by its expression, as ``torch.get_default_dtype()
    (torch.float64 in place of torch.float32)``.
    """
    return {name: f"{name} ({_change(*pair)})" for name, pair in _differing(before).items()}


def put_back(before: dict[str, Any]) -> None:
    """Restore what differs from before."""
    for name, (was, _) in _differing(before).items():
        _SETTINGS[name][1](was)


def _differing(before: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    now = _settings_now()
    return {name: (was, now[name]) for name, was in before.items() if was != now[name]}


@scope
def settings_kept() -> Iterator[dict[str, Any]]:
    """Restore everything after the block, whatever happens in it."""
    before = _settings_now()
    try:
        yield before
    finally:
        put_back(before)


def _change(was: Any, now: Any) -> str:
    """Describe the change; of a mapping, only the entries that differ."""
    if isinstance(was, dict):
        names = sorted(name for name in {*was, *now} if was.get(name) != now.get(name))
        return ", ".join(names)
    if isinstance(was, list | tuple):
        return f"{len(now)} entries in place of {len(was)}" if len(was) != len(now) else "changed"
    return f"{short_repr(now, 60)} in place of {short_repr(was, 60)}"


def _set_environ(values: dict[str, str]) -> None:
    for name in set(os.environ) - set(values):
        del os.environ[name]
    os.environ.update(values)


def _set_filters(filters: list[Any]) -> None:
    module: Any = warnings
    module.filters[:] = filters
    module._filters_mutated()  # so that what was shown "once" is looked up again


def _set_logging(state: tuple[int, int, list[logging.Handler]]) -> None:
    logging.disable(state[0])
    logging.root.setLevel(state[1])
    logging.root.handlers[:] = state[2]


def _logging() -> tuple[int, int, list[logging.Handler]]:
    return logging.root.manager.disable, logging.root.level, list(logging.root.handlers)


def _matmul_precision() -> str:
    """Read it without the warning of torch 2.9 that there is another way to set it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.get_float32_matmul_precision()


_multiprocessing: Any = torch.multiprocessing  # these functions have no types
_NAMES = ("SIGINT", "SIGTERM", "SIGALRM", "SIGUSR1")
_SIGNALS = [each for each in signal.Signals if each.name in _NAMES]
_locale = partial(locale.setlocale, locale.LC_ALL)  # without a name it returns that of the present


def _set_handlers(handlers: list[Any]) -> None:
    for number, handler in zip(_SIGNALS, handlers, strict=True):
        if handler is not None:  # None: not installed from Python, which cannot set it
            signal.signal(number, handler)


_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "os.getcwd()": (os.getcwd, os.chdir),
    "os.environ": (lambda: dict(os.environ), _set_environ),
    "torch.get_default_dtype()": (torch.get_default_dtype, torch.set_default_dtype),
    "torch.get_deterministic_debug_mode()": (
        torch.get_deterministic_debug_mode,
        torch.set_deterministic_debug_mode,
    ),
    "torch.get_num_threads()": (torch.get_num_threads, torch.set_num_threads),
    "torch.get_float32_matmul_precision()": (_matmul_precision, torch.set_float32_matmul_precision),
    "torch.multiprocessing.get_sharing_strategy()": (
        _multiprocessing.get_sharing_strategy,
        _multiprocessing.set_sharing_strategy,
    ),
    "locale.setlocale(locale.LC_ALL)": (_locale, _locale),
    "warnings.filters": (lambda: list(warnings.filters), _set_filters),
    "logging.root": (_logging, _set_logging),
    "signal.getsignal()": (lambda: list(map(signal.getsignal, _SIGNALS)), _set_handlers),
    "gc.isenabled()": (gc.isenabled, lambda on: gc.enable() if on else gc.disable()),
    "socket.getdefaulttimeout()": (socket.getdefaulttimeout, socket.setdefaulttimeout),
    "sys.getrecursionlimit()": (sys.getrecursionlimit, sys.setrecursionlimit),
    "sys.path": (lambda: list(sys.path), lambda path: sys.path.__setitem__(slice(None), path)),
    "sys.stdout": (lambda: sys.stdout, lambda file: setattr(sys, "stdout", file)),
    "sys.stderr": (lambda: sys.stderr, lambda file: setattr(sys, "stderr", file)),
    "tempfile.tempdir": (tempfile.gettempdir, lambda name: setattr(tempfile, "tempdir", name)),
}
