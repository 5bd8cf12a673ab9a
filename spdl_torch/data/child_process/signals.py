"""Signals that are the trainer's business, also where its whole process group gets them.

Ctrl-C goes to every process of a terminal, a batch system's SIGTERM or SIGUSR1 to every process of
a job. What is to be done then (save a checkpoint, take some more batches for it, end) the trainer
knows. Its children go on, and end when it hangs up or is gone.
"""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["TRAINERS", "leave_to_the_trainer", "trainers_signals_held"]

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
TRAINERS = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))


def leave_to_the_trainer() -> None:
    """Called in the child, first of all. What ``trainers_signals_held`` has held back is dropped.

    By handlers that do nothing: being ignored would be inherited by programs that the dataset
    starts, which then could not be ended by SIGTERM. Those that are ignored already (nohup), or
    are handled by a library, stay as they are.
    """
    taken = [each for each in TRAINERS if signal.getsignal(each) not in (signal.SIG_IGN, None)]
    for each in taken:
        signal.signal(each, _do_nothing)
        if hasattr(signal, "siginterrupt"):
            signal.siginterrupt(each, False)  # reads of the workers' libraries go on
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, TRAINERS)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lambda: _back_to_default(taken))


@contextmanager
def trainers_signals_held() -> Iterator[None]:
    """A process that is started meanwhile gets none before it leaves them to the trainer."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, TRAINERS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _do_nothing(*_: object) -> None:
    pass


def _back_to_default(taken: list[signal.Signals]) -> None:
    """A process that the dataset forks is its own affair."""
    for each in taken:
        is_ctrl_c = each is signal.SIGINT
        signal.signal(each, signal.default_int_handler if is_ctrl_c else signal.SIG_DFL)
