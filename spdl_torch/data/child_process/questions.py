"""Questions to a worker process, by a pipe of their own, and its answers.

The thread that asks also reads the answer. It must not come through the receiver, which may be
waiting for a lock: a signal handler that asks may have interrupted the thread that holds it.
"""

from __future__ import annotations

import pickle
import socket
import struct
import threading
from time import monotonic
from typing import TYPE_CHECKING, Any

from .framing import socket_of
from .messages import Ask

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

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
    """The questions to one process. Any thread may ask, one after the other."""

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
