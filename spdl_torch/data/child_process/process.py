"""A child process from its start to its end, however multiprocessing starts it."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import nullcontext
from multiprocessing import connection, forkserver, resource_tracker
from typing import TYPE_CHECKING, Any

from .signals import trainers_signals_held

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.context import BaseContext
    from multiprocessing.process import BaseProcess

__all__ = ["ChildProcess", "server_is_anothers", "start_child"]

_MOST_STARTS = 3
_SERVER_END_SECONDS = 10.0  # in which one that takes no more requests has ended
_TELL_SECONDS = 2.0  # for a fork server to say how a process has ended that has ended

_UNKNOWN_CODE = 255  # multiprocessing's, for a process whose fork server is gone


# Or the server that another thread has started by then would be the one that is waited for.
_one_at_a_time = threading.Lock()


def _renew_lock() -> None:
    """In a forked process nobody would let go of it."""
    global _one_at_a_time
    _one_at_a_time = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


class ChildProcess:
    """Used by the thread that started it; ``forget`` is called in forked processes."""

    def __init__(self, process: BaseProcess, *, is_served: bool) -> None:
        self._process = process
        self._is_served = is_served  # a fork server's child, and not a child of ours
        assert process.pid is not None, "guaranteed by start()"
        self.pid = process.pid
        self.was_terminated = False
        """By ``Process.terminate()`` in this process."""
        # Tells of the end by itself. What multiprocessing has in its place for the child of a fork
        # server is closed by the server, which may be ended before the child is.
        self._pidfd = _pidfd_of(self.pid)
        # The child leaves SIGTERM to the trainer. multiprocessing, which ends processes by it when
        # somebody asks it to, and all that are left at exit, shall have another way.
        popen: Any = getattr(process, "_popen", None)  # private: without it, SIGTERM has no effect
        if popen is not None and os.name == "posix":
            popen.terminate = self._terminate

    @property
    def ends(self) -> list[Any]:
        """What ``multiprocessing.connection.wait`` finds ready when the process has ended."""
        if self._pidfd is not None:
            return [self._pidfd]
        return [] if self._is_served else [self._process.sentinel]

    def join(self, seconds: float) -> bool:
        """Wait until it has ended; False if it has not in that time."""
        if self._pidfd is not None:
            return bool(connection.wait([self._pidfd], seconds))
        self._process.join(seconds)
        return self._process.exitcode is not None

    def kill(self) -> None:
        """End it at once."""
        try:
            if self._pidfd is not None:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            else:
                self._process.kill()
        except ProcessLookupError:
            pass  # it has just ended

    def exit_code(self) -> int | None:
        """How it has ended, as ``Process.exitcode`` says; None = nobody can tell."""
        self._process.join(_TELL_SECONDS)
        code = self._process.exitcode
        if not self._is_served or code not in (None, _UNKNOWN_CODE):
            return code
        try:
            # A process that has lost its parent becomes that of process 1, which may be this one.
            pid, status = os.waitpid(self.pid, os.WNOHANG)
        except ChildProcessError:
            return None
        return os.waitstatus_to_exitcode(status) if pid else None

    def close(self) -> None:
        """Give back what belongs to a process that has ended."""
        self.forget()
        try:
            self._process.close()
        except ValueError:
            pass  # somebody else has waited for it, so multiprocessing believes that it runs

    def forget(self) -> None:
        """In a forked process: it is the parent's."""
        pidfd, self._pidfd = self._pidfd, None
        if pidfd is not None:
            os.close(pidfd)

    def _terminate(self) -> None:
        self.was_terminated = True
        self.kill()


def start_child(
    context: BaseContext, target: Callable[..., None], arguments: tuple[Any, ...]
) -> ChildProcess:
    """Start a process. A fork server that is on its way out (Ctrl-C met it while it was being
    started) takes requests to its grave: then another one is asked.

    Raises: what pickle raises on an argument; RuntimeError: the fork server is another process's;
        OSError, EOFError: it could not be started.
    """
    is_served = context.get_start_method() == "forkserver"
    for tries_left in reversed(range(_MOST_STARTS)):
        process = context.Process(  # type: ignore[attr-defined]
            target=target, args=arguments, name="spdl-loader", daemon=True
        )
        with _one_at_a_time:
            try:
                with _held_for(context):
                    process.start()
                break
            except ChildProcessError as error:
                raise RuntimeError(
                    "DataLoader: multiprocessing's fork server belongs to the process from which "
                    'this one was forked. Pass multiprocessing_context="spawn" here.'
                ) from error
            except (ConnectionError, EOFError) as error:
                if not (is_served and tries_left and _server_ends(error)):
                    raise
    return ChildProcess(process, is_served=is_served)


def server_is_anothers() -> bool:
    """Whether the fork server was started by the process from which this one was forked."""
    pid = _server_pid()
    if pid is None or not hasattr(os, "waitid"):
        return False
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return True
    return False


def _held_for(context: BaseContext) -> Any:
    """A child that is forked or spawned inherits what is held back. A fork server, which may be
    started here, would hand it on to children of others: see ``ChildConnection`` for what is done
    there.
    """
    if context.get_start_method() == "forkserver":
        return nullcontext()
    if os.name == "posix":
        resource_tracker.ensure_running()  # or it would be started meanwhile, and let go of them
    return trainers_signals_held()


def _server_ends(error: Exception) -> bool:
    """Wait until it has ended, if that is what the error says; multiprocessing then starts one."""
    pid = _server_pid()
    pidfd = None if pid is None else _pidfd_of(pid)
    if pidfd is None:
        return True
    # A broken pipe may as well be the child's, which could not import the trainer's script.
    seconds = 1.0 if isinstance(error, BrokenPipeError) else _SERVER_END_SECONDS
    try:
        return bool(connection.wait([pidfd], seconds))
    finally:
        os.close(pidfd)


def _server_pid() -> int | None:
    return getattr(getattr(forkserver, "_forkserver", None), "_forkserver_pid", None)


def _pidfd_of(pid: int) -> int | None:
    """None where the system has none, or the process is gone."""
    try:
        return os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None
    except OSError:
        return None
