"""Questions to a worker process, by a pipe of their own, and its answers: what is at work? what did
the threads do?"""

from __future__ import annotations

import os
import pickle
import socket
import struct
import threading
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

from ....engine.recorder import FlightRecorder
from ....errors import PipelineStopped
from ..activity import Activity, describe_activities
from .messages import Ask
from .wire import OwnedSocket

if TYPE_CHECKING:
    from multiprocessing.connection import Connection


def socket_of(connection: Connection) -> OwnedSocket:
    """Return another descriptor of a connection, as a socket.

    Call it while nobody reads or writes. A new socket takes the process's default timeout; until it
    is reset, in here, reads and writes of ``Connection`` fail instead of waiting.
    """
    return OwnedSocket(socket.socket(fileno=os.dup(connection.fileno())))


_PART_BYTES = 8_000
"""The size of an answer's parts. A ``Connection`` writes so little in one call into the system,
which ends without the GIL: the asker, who reads a whole part, never waits for it."""

_head = struct.Struct("<Q?")


def answer(pipe: Connection, number: int, value: Any) -> None:
    """Answer that question. Blocks until somebody reads. Raises: OSError: the trainer is gone."""
    content = pickle.dumps(value, 5)
    for first in range(0, len(content), _PART_BYTES):
        is_last = first + _PART_BYTES >= len(content)
        pipe.send_bytes(_head.pack(number, is_last) + content[first : first + _PART_BYTES])


class Questions:
    """The questions to one process. Any thread may ask, one after the other.

    The thread that asks also reads the answer. It must not come by the wire: a signal handler that
    asks may have interrupted the thread that reads there.
    """

    def __init__(self) -> None:
        # Re-entrant: a signal handler may ask while the thread that it interrupted asks; it gets no
        # answer.
        self._lock = threading.RLock()
        self._is_asking = False
        self._is_reading = False  # stays set by Ctrl-C in a part: what follows could not be read
        self._num_asked = 0
        self.pipe: Connection | None = None
        # Hang up through a socket of its own: its descriptor cannot have been reused meanwhile.
        self._hook: socket.socket | None = None
        self._hook_lock = threading.RLock()  # re-entrant: a finalizer may hang up

    def open(self, pipe: Connection) -> None:
        """Ask a process that is up."""
        with self._hook_lock:
            self._hook = socket_of(pipe)
        self.pipe = pipe

    def ask(self, question: str, argument: Any = None, *, timeout: float) -> Any:
        """Ask the process and return its answer.

        None: it is not up or gone, it did not answer within ``timeout`` seconds, or the caller is a
        signal handler that interrupted another question.
        """
        with self._lock:
            pipe = self.pipe
            if pipe is None or self._is_asking or self._is_reading:
                return None
            self._is_asking = True
            try:
                self._num_asked += 1
                asked = Ask(self._num_asked, question, argument)
                pipe.send_bytes(pickle.dumps(tuple(asked), 5))
                return self._answer(pipe, asked.number, monotonic() + timeout)
            except (EOFError, OSError):
                return None  # it is gone
            finally:
                self._is_asking = False

    def _answer(self, pipe: Connection, number: int, end: float) -> Any:
        """Return the answer to that question; None = it has not come in time."""
        content = bytearray()
        while pipe.poll(max(0.0, end - monotonic())):
            self._is_reading = True
            part = pipe.recv_bytes()
            self._is_reading = False
            of_question, is_last = _head.unpack_from(part)
            if of_question != number:
                continue  # late, for a caller that has given up
            content += part[_head.size :]
            if is_last:
                return pickle.loads(content)
        return None

    def hang_up(self) -> None:
        """End the wait for an answer. Never blocks; safe in a finalizer."""
        with self._hook_lock:
            hook = self._hook
        if hook is not None:
            try:
                hook.shutdown(socket.SHUT_RDWR)
            except (OSError, ValueError):
                pass  # the other side, or this one, closed it first

    def detach(self) -> None:
        """Hang up, and let go of the pipe, which is about to be closed, once nobody asks."""
        self.hang_up()
        with self._lock:
            self.pipe = None
        with self._hook_lock:
            hook, self._hook = self._hook, None
        if hook is not None:
            hook.close()

    def forget(self) -> None:
        """Close a forked process's copy of the pipe's socket."""
        if self._hook is not None:
            self._hook.close()


_FINISH_SECONDS = 5.0  # for the sample that is being fetched when the trainer is gone


class Listener:
    """Answers on a thread of its own, which otherwise sleeps. It keeps nothing of the user's: the
    dataset ends with its worker.
    """

    def __init__(self, control: Connection, pipeline_number: int, *, records: bool) -> None:
        self._control = control
        self._pipeline_number = pipeline_number
        self._records = records
        self.activity = Activity()
        """What the worker does now; the worker, on the main thread, writes it."""
        self._recorder: FlightRecorder | None = None

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._run, name="spdl-listener", daemon=True).start()

    def new_recorder(self) -> FlightRecorder:
        """Return the recorder of an epoch that begins; questions are about it from now on."""
        self._recorder = FlightRecorder("DataLoader", self._pipeline_number, enabled=self._records)
        return self._recorder

    def _run(self) -> None:
        """Answer until the trainer is gone; then end the process, if need be by force."""
        while True:
            try:
                number, question, argument = pickle.loads(self._control.recv_bytes())
                answer(self._control, number, self._reply(question, argument))
            except (EOFError, OSError):
                break
        # The main thread finds the connection closed as well, and ends the process after its
        # sample. If that does not return, the process ends here.
        sleep(_FINISH_SECONDS)
        os._exit(0)

    def _reply(self, question: str, argument: Any) -> Any:
        activity = self.activity
        try:
            is_idle = activity.job is None and not activity.beginning
            if question == "at_work" and is_idle:
                return "None of its threads is at work."  # it waits for a job, in our own code
            if question == "at_work":
                return describe_activities([activity], [threading.main_thread()], argument)
            return None if self._recorder is None else self._recorder.stages_copied()
        except PipelineStopped:
            return None
