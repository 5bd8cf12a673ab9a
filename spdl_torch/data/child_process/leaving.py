"""How a worker process ends: the part of the interpreter's teardown that is safe, and fast.

All of it is skipped by ``os._exit``: threads may still be inside user code, and would crash. As far
as torch's workers run the user's finalizers and write what the user's files have buffered, so do
these: by each start method, what is done here is at least what theirs do.
"""

from __future__ import annotations

import atexit
import gc
import io
import os
import sys
import weakref
from multiprocessing import util
from typing import NoReturn

import torch.library


def leave(*, is_forked: bool, is_spawned: bool) -> NoReturn:
    """End the process. Its dataset is gone, unless the user's own code keeps it."""
    if is_forked:
        # A forked child has inherited the trainer's exit functions and files: they are not for it.
        getattr(util, "_exit_function", int)()
    else:
        _keep_operators()
        getattr(atexit, "_run_exitfuncs", int)()
        _flush_files()
        if is_spawned:
            gc.collect()  # without what is frozen, which is most of what was imported
            gc.unfreeze()
            _flush_files()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(0)


def _keep_operators() -> None:
    """Let torch's operators end with the process. One of its exit functions would take them out of
    its tables one by one first, in 50 ms, a third of what a fork server's child costs."""
    for finalizer in list(getattr(weakref.finalize, "_registry", ())):
        found = finalizer.peek()
        if found is not None and getattr(found[1], "__module__", None) == torch.library.__name__:
            finalizer.atexit = False


def _flush_files() -> None:
    """Write what open files have buffered, but for frozen ones: those are the fork server's."""
    kind = io.IOBase.__base__  # unlike IOBase, it asks no object for its class
    assert kind is not None, "IOBase has a base in C"
    for each in gc.get_objects():
        if issubclass(type(each), kind):
            try:
                each.flush()
            except BaseException:  # it is closed, or the user's own
                continue
