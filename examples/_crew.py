"""Worker processes that start together, report their progress, and stop on request.

The parent makes a :class:`Crew`, each worker gets a :class:`Boss`; a pipe joins them, so each
notices the other's end, however it came about. Nothing is shared that a killed process could leave
locked.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import time
from dataclasses import dataclass
from multiprocessing import connection, resource_tracker
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

_STOPS = (signal.SIGINT, signal.SIGTERM)
_GRACE_SECONDS = 10.0
"""The seconds that a worker may take to finish its work after it was asked to stop."""


@dataclass(frozen=True, slots=True)
class Boss:
    """A worker's connection to the parent."""

    _wire: Connection

    def wait_for_start(self, report: Any) -> bool:
        """Report that this worker is prepared, and wait until all are; return False = do not
        begin."""
        self._wire.send(("ready", report))
        return self._wire.recv() == "go"

    def report(self, report: Any) -> None:
        """Report what is done so far."""
        self._wire.send(("so far", report))

    def says_stop(self) -> bool:
        """Return whether the work is to end. Does not block. True also if the parent has died."""
        return self._wire.poll()


def _work(target: Callable[[Any, Boss], Any], job: Any, wire: Connection) -> None:
    # SIGINT and SIGTERM are blocked here from the start: Ctrl-C goes to the whole process group,
    # and it is the parent that says when to stop.
    with contextlib.suppress(EOFError, BrokenPipeError):  # the parent has died: nobody listens
        try:
            wire.send(("done", target(job, Boss(wire))))
        except (EOFError, BrokenPipeError):
            raise
        except Exception as error:
            wire.send(("failed", _reasons(error)))


def _reasons(error: BaseException) -> str:
    """Return the errors inside a failed pipeline, a line each, with the notes that say where."""
    if isinstance(error, BaseExceptionGroup):
        return "\n".join(dict.fromkeys(_reasons(member) for member in error.exceptions))
    notes = [f"({note})" for note in getattr(error, "__notes__", [])]
    return " ".join([f"{type(error).__name__}: {error}", *notes])


@dataclass(kw_only=True, slots=True)
class Worker:
    """The parent's view of a worker."""

    job: Any
    process: BaseProcess
    wire: Connection
    report: Any = None
    """The newest one; None before the first."""
    is_ready: bool = False
    is_done: bool = False
    failure: str | None = None

    def read(self) -> None:
        """Read a message, or notice that there will be none."""
        try:
            what, content = self.wire.recv()
        except (EOFError, OSError):
            self.process.join()
            self.is_done, self.failure = True, _how_it_ended(self.process.exitcode)
            return
        if what == "failed":
            self.is_done, self.failure = True, content
        else:
            self.report, self.is_ready, self.is_done = content, True, what == "done"

    def say(self, word: str) -> None:
        """Send ``go`` or ``stop``, unless the worker has ended."""
        with contextlib.suppress(OSError):
            self.wire.send(word)


def _how_it_ended(exitcode: int | None) -> str:
    if exitcode is None or exitcode >= 0:
        return f"the process ended with exit code {exitcode} before its work was done."
    name = signal.Signals(-exitcode).name
    reason = " Often the machine had no memory left." if name == "SIGKILL" else ""
    return f"the process was killed by {name}.{reason}"


class Crew:
    """One spawned process for each job; each calls ``target(job, boss)`` and reports its result.

    SIGTERM and Ctrl-C: the workers are asked to stop and have 10 s for it, none after a second
    signal. A worker that fails or dies stops the others in the same way. Leaving the block ends
    every process, whatever happened in it.
    """

    def __init__(self, target: Callable[[Any, Boss], Any], jobs: Sequence[Any]) -> None:
        self._target = target
        self._jobs = jobs
        self._must_end_by = float("inf")
        self.workers: list[Worker] = []
        self.signal: int | None = None
        """The first signal that asked to stop."""

    def __enter__(self) -> Crew:
        context = multiprocessing.get_context("spawn")
        resource_tracker.ensure_running()  # its start would undo the blocking below (Python 3.11)
        for number in _STOPS:
            signal.signal(number, self._on_signal)
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)  # the workers inherit it
        try:
            for job in self._jobs:
                ours, theirs = context.Pipe()
                arguments = (self._target, job, theirs)
                process = context.Process(target=_work, args=arguments, daemon=True)
                process.start()
                theirs.close()  # so that the end of the worker is the end of the pipe
                self.workers.append(Worker(job=job, process=process, wire=ours))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            if not worker.is_done:
                worker.process.kill()
            worker.process.join()

    def run(self, report: Callable[[], None], interval_seconds: float) -> None:
        """Start all at the same moment, call ``report`` regularly, and return when the last is
        done."""
        while not all(worker.is_ready or worker.is_done for worker in self.workers):
            self._listen(0.5)
        for worker in self.workers:
            worker.say("stop" if self._is_stopping() else "go")
        due = time.monotonic() + interval_seconds
        while not all(worker.is_done for worker in self.workers):
            if time.monotonic() > self._must_end_by:
                return
            self._listen(min(max(due - time.monotonic(), 0.0), 0.5))
            if time.monotonic() >= due:
                report()
                due += interval_seconds

    def failures(self) -> list[str]:
        """Return a line for each worker that failed."""
        return [f"{w.job}: {w.failure}" for w in self.workers if w.failure is not None]

    def _listen(self, timeout: float) -> None:
        talking = {worker.wire: worker for worker in self.workers if not worker.is_done}
        for wire in connection.wait(list(talking), timeout):
            talking[wire].read()
            if talking[wire].failure is not None:
                self._stop(_GRACE_SECONDS)

    def _on_signal(self, number: int, _frame: object) -> None:
        again, self.signal = self.signal is not None, self.signal or number
        self._stop(0.0 if again else _GRACE_SECONDS)

    def _stop(self, grace_seconds: float) -> None:
        self._must_end_by = min(self._must_end_by, time.monotonic() + grace_seconds)
        for worker in self.workers:
            worker.say("stop")

    def _is_stopping(self) -> bool:
        return self._must_end_by < float("inf")
