"""Choose how worker processes are started: as torch starts its workers.

That is ``multiprocessing_context``, else the start method of the whole program, else the platform's
default. By ``fork`` (Linux, up to Python 3.13) a child has a copy of the trainer's memory: nothing
has to be picklable, and a script needs no guard. By ``forkserver`` a server process imports torch
once, and every child is forked from it in tens of milliseconds; by ``spawn`` every child imports
everything.
"""

from __future__ import annotations

import multiprocessing
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multiprocessing.context import BaseContext

_PRELOADED = "spdl_torch.loader.backends.processes.child"


def context_of(given: Any) -> BaseContext:
    """Return the given context, else the program's or the platform's.

    Raises: RuntimeError: this process may not start another. ValueError: it starts threads.
    """
    if multiprocessing.current_process().daemon:
        raise RuntimeError(
            "DataLoader: this loader starts worker processes, which multiprocessing forbids in a "
            "daemonic process, such as a worker of a DataLoader. Pass "
            'isolation="thread" if the dataset may be used by several threads, or num_workers=0.'
        )
    if isinstance(given, str):
        given = multiprocessing.get_context(given)
    if starts_threads(given):
        raise ValueError(
            'DataLoader: isolation="process" needs a multiprocessing_context that starts '
            f"processes, got {given!r}, which starts threads. Leave one of the two out."
        )
    if given is None:
        given = multiprocessing.get_context()
        if given.get_start_method() == "forkserver":
            from .process import server_is_anothers  # loaders on threads ask this module, too

            given = multiprocessing.get_context("spawn") if server_is_anothers() else given
    if given.get_start_method() == "forkserver":
        _preload(given)
    return given  # type: ignore[no-any-return]  # a context


def starts_threads(given: Any) -> bool:
    """Return whether a context's processes are threads in truth, by which some libraries have
    torch's loader use threads."""
    kind = getattr(given, "Process", None)
    return isinstance(kind, type) and issubclass(kind, threading.Thread)


def forks(context: BaseContext) -> bool:
    """Return whether children have a copy of this process's memory."""
    return context.get_start_method() == "fork"


def _preload(context: Any) -> None:
    """Let the server import this package, unless it already runs or the user set its imports."""
    from multiprocessing import forkserver  # forked children need no server

    server = getattr(forkserver, "_forkserver", None)  # private: without it, only slower
    is_untouched = getattr(server, "_preload_modules", None) == ["__main__"]
    if is_untouched and getattr(server, "_forkserver_pid", 0) is None:
        context.set_forkserver_preload(["__main__", _PRELOADED])
