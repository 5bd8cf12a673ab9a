"""Leave signals to the trainer, even when its whole process group gets them.

Ctrl-C goes to every process of a terminal, a batch system's SIGTERM or SIGUSR1 to every process of
a job. Only the trainer knows what to do then (save a checkpoint, take some more batches for it,
end). Its children go on, and end when it hangs up or is gone.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator

from ....locks import in_forked_child
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
    in_forked_child(lambda: _back_to_default(taken))


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


def _do_nothing(*_: object) -> None:
    pass


def _back_to_default(taken: list[signal.Signals]) -> None:
    """Restore default handling in a process that the dataset forks."""
    for each in taken:
        is_ctrl_c = each is signal.SIGINT
        signal.signal(each, signal.default_int_handler if is_ctrl_c else signal.SIG_DFL)
