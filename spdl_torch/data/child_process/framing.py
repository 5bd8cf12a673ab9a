"""Messages as a ``Connection`` frames them, and its descriptor as a socket."""

from __future__ import annotations

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
