"""The messages between the trainer and the worker process, small, whatever the batch size: what
they say, how a ``Connection`` frames them, whether one has come, and its descriptor as a socket."""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
from multiprocessing import connection
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.connection import Connection

    from ..checkpoint.user_state import WorkerState
    from ..rng.keys import StreamKey
    from ..workers.jobs import Result
    from .error_pickle import PackedError


class Free(NamedTuple):
    """To the child: no tensor in the trainer views these slabs any more."""

    slabs: tuple[int, ...]
    """The slabs that may be written again."""
    spent: tuple[int, ...]
    """The slabs that may not: views in a forked process may have outlived the trainer's."""


class Restart(NamedTuple):
    """To the child: begin another epoch, and drop outstanding jobs."""

    epoch: int
    key: StreamKey
    workers: Sequence[WorkerState]


class Ask(NamedTuple):
    """To the child, by a pipe of its own: a question. The answer comes back by that pipe."""

    number: int
    """The question's, which its answer has as well."""
    question: str
    """The question: ``at_work`` or ``rows``."""
    argument: Any = None


class Span(NamedTuple):
    """A part of a slab, in bytes."""

    offset: int
    size: int


class Up(NamedTuple):
    """From the child, its first message: signals to the trainer's group no longer end it."""


class Answer(NamedTuple):
    """From the child: the result of a job, whose batch is a ``Packed``."""

    epoch: int
    result: Result
    retired: tuple[int, ...]
    """The slabs that will not be used again, because they were too small."""
    readings: bytes | None
    """The pickle of a ``Readings``, opened on demand; None = no newer ones."""


class LogLine(NamedTuple):
    """From the child: a record of one of our loggers."""

    logger: str
    level: int
    text: str


class Fatal(NamedTuple):
    """From the child, its last message: why it cannot go on."""

    what: str
    error: PackedError


_MOST_SIZE = 0x7FFFFFFF

_size = struct.Struct("!i").pack
_large_size = struct.Struct("!iQ").pack


class Arrivals:
    """Whether a message has come by a connection, or one of ``ends`` is reported.

    It registers these once. ``multiprocessing.connection.wait``, which takes its place where there
    is no ``poll``, does so in each call: 25 calls of Python code for each message.
    """

    def __init__(self, own: Connection, ends: Sequence[Any] = ()) -> None:
        self._own, self._ends = own, ends
        self._number = own.fileno()
        self._poll: Any = getattr(select, "poll", None) and select.poll()
        if self._poll is not None:
            for each in (self._number, *ends):
                self._poll.register(each, select.POLLIN)

    def wait(self) -> bool:
        """Wait for one of them; return whether it is a message, or the end of the connection."""
        if self._poll is None:
            connection.wait([self._own, *self._ends])
        else:
            for number, _ in self._poll.poll():
                if number == self._number:
                    return True
        return self._own.poll(0)

    def have_come(self) -> bool:
        """Return whether a message is there. Requires that there are no ``ends``."""
        return bool(self._poll.poll(0)) if self._poll is not None else self._own.poll(0)


def framed(content: bytes) -> bytes:
    """Return a message as a ``Connection`` writes it and reads it: preceded by its size."""
    size = len(content)
    return (_size(size) if size <= _MOST_SIZE else _large_size(-1, size)) + content


def socket_of(connection: Connection) -> socket.socket:
    """Return another descriptor of a connection, as a socket.

    Call it while nobody reads or writes. A new socket takes the process's default timeout; until it
    is reset, here, reads and writes of ``Connection`` fail instead of waiting.
    """
    found = socket.socket(fileno=os.dup(connection.fileno()))
    found.settimeout(None)
    return found


def send_descriptor(line: socket.socket, descriptor: int) -> None:
    """Send a descriptor, after the message that announces it. Raises: OSError: nobody reads.

    multiprocessing's own function then waits for an answer, on macOS and from Python 3.14 on
    everywhere: it would take the first byte of the next job for it.
    """
    socket.send_fds(line, [_WITH_DESCRIPTOR], [descriptor])


def receive_descriptor(line: socket.socket) -> int:
    """Receive a descriptor, which programs that this process starts do not inherit.

    Raises: EOFError: the other side is gone; OSError: this process has no descriptor left for it.
    """
    flags = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
    try:
        content, descriptors, _, _ = socket.recv_fds(line, 1, 1, flags)
    except ConnectionResetError as error:  # a job that it had not read yet was lost
        raise EOFError from error
    if not content:
        raise EOFError
    if not descriptors:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    os.set_inheritable(descriptors[0], False)
    return descriptors[0]


_WITH_DESCRIPTOR = b"d"  # one comes with a byte at least
