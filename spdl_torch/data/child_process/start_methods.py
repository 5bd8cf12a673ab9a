"""Choose how the loading process is started.

``forkserver`` on Linux: a server process imports torch once, and every child is forked from it in
tens of milliseconds. Elsewhere ``spawn``: every child imports everything. ``fork`` is refused: the
trainer has threads, and a lock that one of them holds stays held in a forked child for ever.
"""

from __future__ import annotations

import multiprocessing
import sys
from multiprocessing import forkserver
from typing import TYPE_CHECKING, Any

from ...errors import UnsupportedOptionError
from .process import server_is_anothers

if TYPE_CHECKING:
    from multiprocessing.context import BaseContext

__all__ = ["check_context", "context_of"]

_PRELOADED = "spdl_torch.data.child_process.child"


def check_context(context: Any) -> None:
    """Refuse a start method that forks. Raises: UnsupportedOptionError."""
    name = context if isinstance(context, str) else getattr(context, "get_start_method", str)()
    if name == "fork":
        raise UnsupportedOptionError(
            'DataLoader: isolation="process" cannot start its process by "fork": a lock that a '
            "thread of this process holds at that moment would stay held in the child for ever. "
            'Pass multiprocessing_context="forkserver" or "spawn", or leave it out.'
        )


def context_of(given: Any) -> BaseContext:
    """Return the given context, else the one that the user has set for the whole program, else the
    fastest safe one.

    Raises: UnsupportedOptionError: it would fork; RuntimeError: this process may not start another.
    """
    if multiprocessing.current_process().daemon:
        raise RuntimeError(
            'DataLoader: isolation="process" starts a process, which multiprocessing does not let '
            "its daemonic ones do, such as the workers of torch's DataLoader. Leave isolation out: "
            "threads can be started here."
        )
    if isinstance(given, str):
        given = multiprocessing.get_context(given)
    if given is None:
        chosen = multiprocessing.get_start_method(allow_none=True)
        if chosen not in ("spawn", "forkserver"):
            chosen = "forkserver" if sys.platform.startswith("linux") else "spawn"
            if server_is_anothers():
                chosen = "spawn"
        given = multiprocessing.get_context(chosen)
    check_context(given)
    if given.get_start_method() == "forkserver":
        _preload(given)
    return given  # type: ignore[no-any-return]


def _preload(context: Any) -> None:
    """Let the server import this package, unless it already runs or the user set its imports."""
    server = getattr(forkserver, "_forkserver", None)  # private: without it, only slower
    is_untouched = getattr(server, "_preload_modules", None) == ["__main__"]
    if is_untouched and getattr(server, "_forkserver_pid", 0) is None:
        context.set_forkserver_preload(["__main__", _PRELOADED])
