"""Let a pool of processes fork them where the program would: before a pipeline has threads."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from concurrent.futures import Executor


def fork_processes(executor: Executor | None) -> None:
    """Let the executor fork its processes now, on this thread, if that is what it does.

    A ``ProcessPoolExecutor`` forks them all at its first job, which would come from a stage's
    thread. Copies of that thread lack the caller's context and thread-local variables, and free the
    caller's in the child, where a library may wait for ever for threads that are not there.
    """
    module = sys.modules.get("concurrent.futures.process")  # not imported: no such executor
    if module is None or not isinstance(executor, module.ProcessPoolExecutor):
        return
    context: Any = getattr(executor, "_mp_context", None)  # private: without it, forked later
    if context is not None and context.get_start_method() == "fork":
        with suppress(RuntimeError):  # broken or shut down, which the stage reports
            executor.submit(int)
