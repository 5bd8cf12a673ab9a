"""Messages as a ``Connection`` frames them, and its descriptor as a socket."""

from __future__ import annotations

import errno
import os
import socket
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

_MOST_SIZE = 0x7FFFFFFF

_size = struct.Struct("!i").pack
_large_size = struct.Struct("!iQ").pack


def framed(content: bytes) -> bytes:
    """Return a message as a ``Connection`` writes it and reads it: preceded by its size."""
    size = len(content)
    return (_size(size) if size <= _MOST_SIZE else _large_size(-1, size)) + content


def socket_of(connection: Connection) -> socket.socket | None:
    """Return another descriptor of a connection, as a socket; None = it is not a socket (Windows).

    Call it while nobody reads or writes. A new socket takes the process's default timeout; until it
    is reset, here, reads and writes of ``Connection`` fail instead of waiting.
    """
    if os.name != "posix":
        return None
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
