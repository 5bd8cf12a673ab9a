"""Leave signals to the trainer, even when its whole process group gets them.

Ctrl-C goes to every process of a terminal, a batch system's SIGTERM or SIGUSR1 to every process of
a job. Only the trainer knows what to do then (save a checkpoint, take some more batches for it,
end). Its children go on, and end when it hangs up or is gone.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

from ....scopes import scope

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
TRAINERS = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))


def leave_to_the_trainer() -> None:
    """Make the child disregard the trainer's signals. Called first of all in the child; signals
    that ``trainers_signals_held`` has held back are dropped.

    It sets handlers that do nothing instead of ignoring the signals: programs that the dataset
    starts would inherit that, and SIGTERM could not end them. Signals that are already ignored
    (nohup), or handled by a library, stay as they are.
    """
    taken = [each for each in TRAINERS if signal.getsignal(each) not in (signal.SIG_IGN, None)]
    for each in taken:
        signal.signal(each, _do_nothing)
        if hasattr(signal, "siginterrupt"):
            signal.siginterrupt(each, False)  # do not interrupt system calls of the workers
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, TRAINERS)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lambda: _back_to_default(taken))


@scope
def trainers_signals_held() -> Iterator[None]:
    """Block the trainer's signals, so that a process started meanwhile gets none before it has
    called ``leave_to_the_trainer``."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, TRAINERS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@scope
def handlers_deferred() -> Iterator[None]:
    """Let the program's signal handlers run after the block, so that none raises in its middle.

    Python runs them on the main thread; on another one there is nothing to do, nor inside such a
    block. The signals are not blocked: the system would give them to another thread, and Python
    would run their handlers on this one all the same.
    """
    global _deferral
    is_inside = _deferral is not None and _deferral.is_on
    if is_inside or threading.current_thread() is not threading.main_thread():
        yield
        return
    deferral = _deferral = _Deferral()
    try:
        deferral.begin()
        yield
    finally:
        try:
            deferral.end()
        finally:  # a handler that runs at the end may raise
            _deferral = None
        for number in dict.fromkeys(deferral.noted):
            signal.raise_signal(number)


class _Deferral:
    """A temporary handler for all signals that have one."""

    def __init__(self) -> None:
        # Not valid_signals(): it makes an enum's member of each of them, in three times the time.
        found = {number: signal.getsignal(number) for number in range(1, signal.NSIG)}
        self._handlers: dict[int, Any] = {n: each for n, each in found.items() if callable(each)}
        self.is_on = True
        """Whether signals are noted; False while the handlers are put back, and afterwards."""
        self.noted: list[int] = []
        """The signals that came meanwhile."""

    def __call__(self, number: int, frame: Any) -> None:
        # If a handler raises while they are put back, this one stays in place of the rest.
        if self.is_on:
            self.noted.append(number)
        else:
            self._handlers[number](number, frame)

    def begin(self) -> None:
        """Take the place of the handlers."""
        for number in self._handlers:
            signal.signal(number, self)

    def end(self) -> None:
        """Put the handlers back."""
        self.is_on = False
        for number, handler in self._handlers.items():
            signal.signal(number, handler)


_deferral: _Deferral | None = None


def _end_deferral() -> None:
    """Put the handlers back in a process that was forked meanwhile."""
    global _deferral
    if _deferral is not None:
        _deferral.end()
        _deferral = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_end_deferral)


def _do_nothing(*_: object) -> None:
    pass


def _back_to_default(taken: list[signal.Signals]) -> None:
    """Restore default handling in a process that the dataset forks."""
    for each in taken:
        is_ctrl_c = each is signal.SIGINT
        signal.signal(each, signal.default_int_handler if is_ctrl_c else signal.SIG_DFL)
