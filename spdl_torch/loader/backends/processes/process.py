"""A child process from its start to its end, and why it has ended, in words for its user; and how
it is started: as torch starts its workers.

That is ``multiprocessing_context``, else the start method of the whole program, else the platform's
default. By ``fork`` (Linux, up to Python 3.13) a child has a copy of the trainer's memory: nothing
has to be picklable, and a script needs no guard. By ``forkserver`` a server process imports torch
once, and every child is forked from it in tens of milliseconds; by ``spawn`` every child imports
everything.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from multiprocessing import connection, process as processes, resource_tracker
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

from ....handlers import handlers_deferred
from ....locks import in_forked_child
from ....scopes import scope
from ...placing import starts_threads
from ..activity import workers_at_rest
from .signals import TRAINERS, trainers_signals_held

if TYPE_CHECKING:
    from multiprocessing.context import BaseContext
    from multiprocessing.process import BaseProcess

FINISH_SECONDS = 6.0  # for the sample that is being made; the process ends itself after 5
_LOOK_SECONDS = 0.05  # between two checks of an ending process, where there is no pidfd
_TELL_SECONDS = 2.0  # for a fork server to report how its child ended
_DYING_SECONDS = 2.0  # for a fork server that a signal kills

# With a regex comment, so that it equals no filter of the program's own.
_FORK_WARNING = "This process .* is multi-threaded, use of fork(?# silenced by spdl_torch)"

_UNKNOWN_CODE = 255  # multiprocessing's, for a process whose fork server is gone


_PRELOADED = "spdl_torch.loader.backends.processes.child"

NO_GUARD = (
    " Before it begins, a child runs the script again and imports what that imports: it ends this "
    'way where a loop is not under `if __name__ == "__main__":`, or where a module exits or fails.'
)


class ChildProcess:
    """A child process, used by the thread that started it; forked processes call ``forget``.

    One that was told to end is in nobody's hands any more. ``reap`` releases those that have ended,
    where loaders begin and end an epoch, and at exit; until then they are zombies.
    """

    def __init__(self, process: BaseProcess, *, is_served: bool) -> None:
        self._process = process
        self._is_served = is_served  # a fork server's child, and not a child of ours
        assert process.pid is not None, "guaranteed by start()"
        self.pid = process.pid
        self.was_terminated = False
        """Whether this process called ``Process.terminate()`` on it."""
        self.exit_code: int | None = None
        """As ``Process.exitcode`` gives it, once it is closed; None = unknown."""
        # Signals the child's end directly. multiprocessing's own sentinel of a fork server's child
        # is closed by the server, which may end before the child does.
        self._pidfd = _pidfd_of(self.pid)
        # The child leaves SIGTERM to the trainer, but multiprocessing ends processes with it, on
        # request and at exit: give it another way.
        popen: Any = getattr(process, "_popen", None)  # private: without it, SIGTERM has no effect
        if popen is not None:
            popen.terminate = self._terminate

    @property
    def ends(self) -> list[Any]:
        """The objects that ``multiprocessing.connection.wait`` reports when the process ends."""
        if self._pidfd is not None:
            return [self._pidfd]
        return [] if self._is_served else [self._process.sentinel]

    def join(self, seconds: float) -> bool:
        """Wait for the process to end; return False if it has not within ``seconds``."""
        if self._pidfd is not None:
            return bool(connection.wait([self._pidfd], seconds))
        # A process that the dataset forked may hold the other end of what join() waits for, so
        # poll.
        end = monotonic() + seconds
        while self._process.exitcode is None and monotonic() < end:
            self._process.join(_LOOK_SECONDS)
        return self._process.exitcode is not None

    def end_soon(self) -> None:
        """Note that the process was told to end. Safe in a finalizer, on any thread."""
        _ending.setdefault(self, monotonic() + FINISH_SECONDS)

    def kill(self) -> None:
        """Kill the process."""
        try:
            if self._pidfd is not None:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            else:
                self._process.kill()
        except ProcessLookupError:
            pass  # it has just ended

    def _found_exit_code(self) -> int | None:
        if self._process.exitcode is None:
            self._process.join(_TELL_SECONDS)
        code = self._process.exitcode
        if not self._is_served or code not in (None, _UNKNOWN_CODE):
            return code
        try:
            # A process that lost its parent becomes a child of process 1, which may be this one.
            pid, status = os.waitpid(self.pid, os.WNOHANG)
        except ChildProcessError:
            return None
        return os.waitstatus_to_exitcode(status) if pid else None

    def close(self) -> None:
        """Release a process that has ended, which has the system forget it.

        Not by ``Process.close()``: after that, joining is an error, and at exit multiprocessing
        joins, on another thread, the children that existed a moment ago.
        """
        self.exit_code = self._found_exit_code()
        self.forget()
        popen: Any = getattr(self._process, "_popen", None)  # private: without it, freed later
        if popen is not None:
            vars(popen).pop("terminate", None)  # it refers to this object: break the cycle
            with handlers_deferred():  # functions of Python's close its descriptors
                popen.close()

    def forget(self) -> None:
        """Close this process's descriptor; in a forked one, the child belongs to the parent.

        multiprocessing, which does not know of ``os.fork()``, would terminate and join it at exit.
        """
        _ending.pop(self, None)
        getattr(processes, "_children", set()).discard(self._process)
        pidfd, self._pidfd = self._pidfd, None
        if pidfd is not None:
            os.close(pidfd)

    @property
    def may_be_a_trainers_signal(self) -> bool:
        """Whether it may have ended by a signal that it leaves to the trainer as soon as it is up.
        If the signal also killed the fork server, the exit code is unknown.
        """
        return self.exit_code is None or -self.exit_code in TRAINERS

    def how_it_ended(self) -> str:
        """Describe the end of a process that nobody has asked to end."""
        if self.was_terminated:
            return (
                "was ended by Process.terminate(), which something in this program called. When "
                'ending multiprocessing.active_children(), leave out those named "spdl-loader".'
            )
        return _described(self.exit_code)

    def _terminate(self) -> None:
        self.was_terminated = True
        self.kill()


_ending: dict[ChildProcess, float] = {}
"""The processes that were told to end, and when they are killed."""


@in_forked_child
def _forget_parents() -> None:
    for process in list(_ending):
        process.forget()


def reap(seconds: float = 0.0) -> None:
    """Release the processes that have ended of those that were told to; wait for the others so
    long. Those that have had their time are killed."""
    deadline = monotonic() + seconds
    for process, end in list(_ending.items()):
        if end <= monotonic():
            process.kill()
        if process.join(max(0.0, min(deadline, end) - monotonic())):
            process.close()


def start_child(
    context: BaseContext, target: Callable[..., None], arguments: tuple[Any, ...]
) -> ChildProcess:
    """Start a process. A signal's handler may not raise meanwhile.

    Raises: what pickle raises on an argument; RuntimeError: the fork server is another process's;
        OSError, EOFError: it could not be started.
    """
    process = context.Process(  # type: ignore[attr-defined]  # BaseContext lacks it
        target=target, args=arguments, name="spdl-loader", daemon=True
    )
    # Out of the set of all processes, which serves Python's own tests: what a handler raises in its
    # callbacks, which are written in Python, as the last reference to this one goes, would be lost.
    getattr(processes, "_dangling", set()).discard(process)
    method = context.get_start_method()
    try:
        with ExitStack() as stack:
            if method == "spawn":
                resource_tracker.ensure_running()  # starting it below would unblock the signals
            if method != "forkserver":
                # A child that is spawned inherits the block until it handles the signals itself. A
                # fork server, which may be started here, would pass it on to other code's children.
                stack.enter_context(trainers_signals_held())
            if method == "fork":
                stack.enter_context(workers_at_rest())
                stack.enter_context(_without_warning())
            end = monotonic() + _DYING_SECONDS * (method == "forkserver")
            while process.pid is None:
                try:
                    process.start()
                except EOFError:  # of a fork server that a signal kills: once dead, it is replaced
                    if monotonic() > end:
                        raise
                    sleep(0.01)
    except ChildProcessError as error:
        raise RuntimeError(
            "DataLoader: multiprocessing's fork server belongs to the process from which "
            'this one was forked. Pass multiprocessing_context="spawn" here.'
        ) from error
    return ChildProcess(process, is_served=method == "forkserver")


@scope
def _without_warning() -> Iterator[None]:
    """Keep Python (3.12 and later) from warning of forking a multi-threaded process. Our threads
    rest, or wait for what the child never asks for."""
    if sys.version_info < (3, 12):
        yield
        return
    # Not catch_warnings(): the training loop's thread may be in such a block of its own, and its
    # filters would be put back too late, or never. This takes out the one entry that it puts in,
    # wherever that is by then.
    warnings.filterwarnings("ignore", _FORK_WARNING, DeprecationWarning)
    filters: Any = warnings.filters
    try:
        yield
    finally:
        for each in (filters, warnings.filters):
            for entry in tuple(each):
                if getattr(entry[1], "pattern", None) == _FORK_WARNING:
                    each.remove(entry)


def _pidfd_of(pid: int) -> int | None:
    """Return a pidfd; None where the system has none, or the process is gone."""
    try:
        return os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None
    except OSError:
        return None


def _described(code: int | None) -> str:
    if code is None:
        return "ended; the system no longer knows how."
    if code >= 0:
        return f"ended by itself with exit code {code}."
    name = {each.value: each.name for each in signal.Signals}.get(-code, f"signal {-code}")
    if name != "SIGKILL":
        return f"was killed by {name}."
    return (
        f"was killed by {name}, as the system does when memory runs out: its log would say so; use "
        "fewer workers or smaller batches."
    )


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
        _preload(given)
    return given  # type: ignore[no-any-return]  # a context


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
