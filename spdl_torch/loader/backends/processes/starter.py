"""How worker processes start."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Any

from .process import context_of, forks
from .signals import handlers_deferred
from .worker_process import WorkerProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ....engine.threads import ThreadGroup
    from ....io._transfer.region import LimitedLocker
    from ...checkpoint.user_state import WorkerState
    from ...rng.keys import StreamKey
    from ..backend import LoadSpec


class Starter:
    """Makes and starts the processes of a loader.

    They are forked on the loop's thread, as torch forks its workers: the child's main thread is
    then a copy of the caller's, with the thread-local and context variables that the dataset finds
    there (the precision of decimals, numpy's error handling, torch's grad mode). Signal handlers
    run after that. A fork server may take seconds to start, so a thread waits for it, and Ctrl-C
    need not.
    """

    def __init__(self, context: Any, locker: LimitedLocker | None, threads: ThreadGroup) -> None:
        """``context``: see ``context_of``. ``locker``: see ``WorkerProcess``. ``threads``: the
        group to which the threads belong that wait for a fork server."""
        self._context = context_of(context)
        self.are_copies = forks(self._context)
        """Whether processes are copies of this one and of the thread that starts them."""
        self.locker = locker
        self._threads = threads

    def new(
        self,
        number: int,
        spec: LoadSpec,
        key: StreamKey,
        workers: Sequence[WorkerState],
        *,
        num_lives: int = 1,
    ) -> WorkerProcess:
        """Return a process that is yet to be started."""
        return WorkerProcess(
            *(number, spec, self._context, key, workers), locker=self.locker, num_lives=num_lives
        )

    def start(self, *children: WorkerProcess) -> None:
        """Start processes, and return when they exist. Raises: why one could not be started; all
        of them then end."""
        try:
            if self.are_copies:
                with handlers_deferred():
                    for child in children:
                        child.start()
            else:
                done = threading.Lock()  # not an Event: Ctrl-C in its wait may leave its own held
                done.acquire()
                self.start_late(children, done.release)
                done.acquire()
                for child in children:
                    if isinstance(child.fault, BaseException):
                        raise child.fault
        except BaseException:  # Ctrl-C too
            for child in children:
                child.hang_up()
                child.fault = None  # break the cycle: its traceback holds this frame
            raise

    def start_late(self, children: Sequence[WorkerProcess], then: Callable[[], None]) -> None:
        """Start processes on a thread of its own, which calls ``then`` in the end; those that could
        not be started say so."""
        self._threads.spawn("starter", partial(_start_each, children, then))


def _start_each(children: Sequence[WorkerProcess], then: Callable[[], None]) -> None:
    try:
        for child in children:
            child.start()
    except BaseException as error:
        child.fault, child.is_over = error, True
    finally:
        then()
