"""Why a worker process has ended, in words for its user."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from ....engine.failures import notes_of, text_of
from .error_pickle import unpack_error
from .signals import TRAINERS

if TYPE_CHECKING:
    from .messages import Fatal
    from .process import ChildProcess

NO_GUARD = (
    " Before it begins, a child runs the script again and imports what that imports: it ends this "
    'way where a loop is not under `if __name__ == "__main__":`, or where a module exits or fails.'
)


class Ending:
    """What is known of a process's end. The thread that reads what it sends writes it, the loop's
    and one that starts it.
    """

    def __init__(self) -> None:
        self.fatal: Fatal | None = None
        """The process's own last words."""
        self.broken: BaseException | None = None
        """Why it could not be started, or what it sent not be received."""
        self.exit_code: int | None = None
        self.was_terminated = False
        """Whether something in this program called ``Process.terminate()``."""

    def reaped(self, child: ChildProcess) -> None:
        """Note how a process ended."""
        self.exit_code, self.was_terminated = child.exit_code(), child.was_terminated

    @property
    def is_of_this_program(self) -> bool:
        """Whether the process, or this program, is at fault, and not a signal from elsewhere."""
        return bool(self.fatal or self.broken or self.was_terminated)

    @property
    def is_by_signal(self) -> bool:
        """Whether a signal has ended the process."""
        return self.exit_code is not None and self.exit_code < 0

    @property
    def may_be_a_trainers_signal(self) -> bool:
        """Whether it may be a signal that the process leaves to the trainer as soon as it is up. If
        the signal also killed the fork server, the exit code is unknown.
        """
        return self.exit_code is None or -self.exit_code in TRAINERS

    def death(self, pid: int, *, could_start: bool) -> BaseException:
        """Return a new exception that says why the process ended unasked."""
        if self.fatal is not None:
            return _raised_by(self.fatal)
        where = f"the worker process (pid {pid})"
        if self.broken is not None:
            raised = RuntimeError(
                f"DataLoader: this process could not receive what {where} sent: "
                f"{type(self.broken).__name__}: {self.broken}"
            )
            raised.__cause__ = self.broken
            return raised
        if self.was_terminated:
            return RuntimeError(
                f"DataLoader: {where} was ended by Process.terminate(), which something in this "
                "program called. When ending multiprocessing.active_children(), leave out those "
                'named "spdl-loader".'
            )
        end = _described(self.exit_code)
        return RuntimeError(f"DataLoader: {where} {end}{'' if could_start else NO_GUARD}")


def _raised_by(fatal: Fatal) -> RuntimeError:
    """Return the exception for a process that has said why it cannot go on."""
    cause = unpack_error(fatal.error)
    raised = RuntimeError(f"DataLoader: {fatal.what}: {text_of(cause)}")
    raised.__cause__ = cause
    for note in notes_of(cause):
        raised.add_note(note)
    return raised


def _described(code: int | None) -> str:
    if code is None:
        return (
            "has ended with exit code 255, or in a way that only multiprocessing's fork server "
            "knew, which has ended too."
        )
    if code >= 0:
        return (
            f"ended by itself with exit code {code}: something in it called exit or closed all "
            "files, or it could not be started; its last output is on stderr."
        )
    name = _signal_name(-code)
    if name == "SIGKILL":
        often = (
            "The system kills the largest process when memory runs out: look at its log, and use "
            "fewer workers or smaller batches."
        )
    elif -code in TRAINERS:
        often = "Something sent it that signal while it was being started."
    else:
        often = "The dataset or a library that it uses has crashed there."
    return f"was killed by {name}. {often}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # those between SIGRTMIN and SIGRTMAX have no names
        return f"signal {number}"
