"""What loading changes in the state that all threads of a process share: working directory,
environment, settings."""

from __future__ import annotations

import gc
import locale
import logging
import os
import signal
import socket
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from ..objects.generator_states import generators_kept
from ..scopes import scope
from ..shown_text import short_repr

_OURS = {"torch", "torchvision", "numpy", "spdl_torch"}
_PYTHONS = sys.stdlib_module_names - {"__main__"}


def is_library(module: str) -> bool:
    """Return whether a module's name is one of Python's, torch's or ours."""
    return is_ours(module) or module.partition(".")[0] in _PYTHONS


def is_ours(module: str) -> bool:
    """Return whether it is one of the modules that every loader is made of."""
    return module.partition(".")[0] in _OURS


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


def _num_threads() -> int:
    """Read it on a new thread: one that was there keeps its own when another sets it."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(torch.get_num_threads).result()


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
    "torch.get_num_threads()": (_num_threads, torch.set_num_threads),
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
