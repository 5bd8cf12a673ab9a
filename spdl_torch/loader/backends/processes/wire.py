"""The messages between the trainer and a worker process: over a socket, without a thread of their
own, and small, whatever the batch size.

A message is a head and its content, a pickle. What is longer than 4 KiB lies in a file in memory,
whose descriptor goes with the head: so dozens of messages fit into the socket, and neither side
waits until the other reads.
"""

from __future__ import annotations

import _socket
import array
import errno
import itertools
import mmap
import os
import pickle
import select
import socket
import struct
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain
from multiprocessing import reduction
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from ....handlers import unless_of_handler
from ....locks import RLock
from ..jobs import Loaded

if TYPE_CHECKING:
    from ...checkpoint.user_state import WorkerState
    from ...rng.keys import StreamKey
    from ..jobs import Result
    from .error_pickle import PackedError

LONG_BYTES = 4 * 1024

_KIND = socket.AF_UNIX, socket.SOCK_STREAM, 0

_head = struct.Struct("<IBB")  # the bytes that follow, whether they name a file, descriptors

_READ_BYTES = 16 * 1024
_MOST_DESCRIPTORS = 16  # that come with one read
_descriptors = struct.Struct("i")
_ROOM = socket.CMSG_SPACE(_descriptors.size * _MOST_DESCRIPTORS)
_ancillary, _data = itemgetter(1), itemgetter(2)  # of what is read, and of a part of that

# Plain numbers: an | of flags takes longer than the call.
_CLOSED_ON_EXEC = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))
_AT_ONCE = int(socket.MSG_DONTWAIT)
_SENDING = _AT_ONCE | int(getattr(socket, "MSG_NOSIGNAL", 0))


class File(int):
    """A descriptor that is closed once, and with its last reference. A number, so that making one
    runs no line of Python, where Ctrl-C might come and the descriptor be lost."""

    is_closed = False

    def close(self, close: Callable[[int], None] = os.close) -> None:
        """Close it."""
        if not self.is_closed:
            self.is_closed = True
            close(self)

    __del__ = close


class OwnedSocket(socket.SocketType):
    """A socket that is closed with its last reference, without the warning of Python's: one that
    lives until the interpreter is taken down has done nothing wrong. It is of C, so that making one
    runs no line of Python, where Ctrl-C might come and the descriptor be lost."""

    def __reduce__(self) -> Any:
        return _received, (reduction.DupFd(self.fileno()),)  # to a child that is being started

    def hang_up(self) -> None:
        """End the waits of both sides. Never blocks; safe in a finalizer, and on any thread."""
        try:
            self.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the other side hung up first, or this is a forked process's copy

    __del__ = socket.SocketType.close


def socket_pair() -> tuple[OwnedSocket, OwnedSocket]:
    """Return the two ends of a socket."""
    numbers = map(socket.SocketType.detach, _socket.socketpair())
    ours, theirs = [*map(OwnedSocket, *map(itertools.repeat, _KIND), numbers)]  # in C, at once
    ours.settimeout(None)  # a new socket has the process's default timeout
    theirs.settimeout(None)
    return ours, theirs


def _received(number: Any) -> OwnedSocket:
    end = OwnedSocket(*_KIND, number.detach())
    end.settimeout(None)
    return end


def anonymous_file(name: str, size: int = 0) -> File:
    """Return a new file in memory; ``name`` shows in ``/proc/*/maps``."""
    if hasattr(os, "memfd_create"):
        (found,) = map(File, map(os.memfd_create, (name,)))  # in C, as in _read_once
    else:
        with tempfile.TemporaryFile() as file:  # unlinked at once
            found = File(os.dup(file.fileno()))
    os.ftruncate(found, size)
    return found


def in_file(content: bytes) -> File:
    """Return a new file with that content."""
    file = anonymous_file("spdl-torch-message")
    with open(file, "wb", closefd=False) as writer:
        writer.write(content)
    return file


def content_of(file: File) -> mmap.mmap:
    """Return the content of such a file, and close it."""
    try:
        return mmap.mmap(file, 0, access=mmap.ACCESS_READ)
    finally:
        file.close()


class Wire:
    """One side's end of the socket. One thread at a time reads; any may send."""

    def __init__(self, end: OwnedSocket) -> None:
        self.socket = end
        self.is_over = False
        """Whether the other side has hung up, or is gone, and all that it sent was read."""
        self._sending = RLock()  # re-entrant: sending may log, and that is sent, too
        self._came = bytearray()
        # What was read, and then its descriptors, in the order in which they came. It gets here in
        # C, at once: Ctrl-C finds a descriptor there or here, and who closes this closes it.
        self._read: deque[Any] = deque()
        self._files: deque[File] = deque()
        self.unsent: deque[tuple[bytes | memoryview, tuple[File, ...]]] = deque()
        """What waits until the other side reads."""

    def say(self, message: Any) -> None:
        """Send a message, as ``send``. Raises: what pickle raises."""
        self.send(pickle.dumps(message, 5))

    def send(self, content: bytes, *files: File) -> None:
        """Send the pickle of a message, or keep what does not fit until ``flush``. Never waits. If
        the other side is gone, nothing happens: who reads notices."""
        size = len(content)
        if size > LONG_BYTES:
            files = (in_file(content), *files)
            content = b""
        head = _head.pack(len(content), size > LONG_BYTES, len(files))
        self.unsent.append((head + content, files))
        self.flush()

    def flush(self) -> None:
        """Send what waits, as far as it fits."""
        unsent = self.unsent
        with self._sending:
            while unsent:
                content, files = unsent[0]
                ancillary: Sequence[Any] = ()
                if files:
                    numbers = array.array("i", files)
                    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, numbers)]
                try:
                    sent = self.socket.sendmsg([content], ancillary, _SENDING)
                except BlockingIOError:
                    return
                except unless_of_handler(OSError):
                    unsent.clear()  # it is gone
                    return
                if sent < len(content):
                    unsent[0] = memoryview(content)[sent:], ()
                else:
                    unsent.popleft()

    def wait(self, milliseconds: float | None = None) -> None:
        """Wait until something has come, so long at most; send what is unsent, as it fits."""
        if self.unsent or milliseconds is not None:
            poll = select.poll()
            poll.register(self.socket, select.POLLIN | (select.POLLOUT if self.unsent else 0))
            poll.poll(milliseconds)
            self.read()
            self.flush()
        else:
            self._read_once(_CLOSED_ON_EXEC)

    def read(self) -> None:
        """Read what is there, for ``next``. Never waits."""
        while not self.is_over and self._read_once(_AT_ONCE | _CLOSED_ON_EXEC):
            pass

    def _read_once(self, flags: int) -> bool:
        """Return whether there may be more."""
        try:
            self._read.extend(map(self.socket.recvmsg, (_READ_BYTES,), (_ROOM,), (flags,)))
        except BlockingIOError:
            return False
        except unless_of_handler(OSError):
            self.is_over = True  # a job that the other side had not read was lost
            return False
        content, ancillary, _, _ = self._read[0]
        if ancillary:
            self._take_over()
        else:
            self._read.clear()
        self._came += content
        self.is_over = not content
        # A descriptor ends a read, whatever is behind it.
        return len(content) == _READ_BYTES or bool(ancillary)

    def _take_over(self) -> None:
        """Have each descriptor that was read closed by a ``File``."""
        parts = chain.from_iterable(map(_ancillary, map(deque.popleft, (self._read,))))
        numbers = chain.from_iterable(map(_descriptors.iter_unpack, map(_data, parts)))
        self._files.extend(itertools.starmap(File, numbers))
        for file in () if _CLOSED_ON_EXEC else self._files:
            os.set_inheritable(file, False)

    def next(self) -> tuple[Any, list[File]] | None:
        """Take out the next whole message that was read: its content, and the files that came with
        it. Raises: OSError: this process had no descriptor left for one."""
        came = self._came
        if len(came) < _head.size:
            return None
        size, is_in_file, num_files = _head.unpack_from(came)
        end = _head.size + size
        if len(came) < end:
            return None
        content: Any = bytes(came[_head.size : end])
        del came[:end]
        if len(self._files) < num_files:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        files = [self._files.popleft() for _ in range(num_files)]
        if is_in_file:
            content = content_of(files.pop(0))
        return content, files

    def close(self) -> None:
        """Close this process's end."""
        self.socket.close()
        if self._read:
            self._take_over()
        self._files.clear()
        self.unsent.clear()


Span = tuple[int, int]
"""A part of a slab: the place of its first byte, and the number of bytes."""


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


class Packed(NamedTuple):
    """A batch in the form in which it is sent."""

    slab: int | None
    """The number of its slab; None = it needs none."""
    size: int
    """The slab's size if the trainer has yet to map it, whose file comes with the message; or 0."""
    body: bytes
    """The pickle; empty = it is the last block."""
    blocks: tuple[Span, ...]
    """The spans of the large tensors and arrays, in the pickle's order."""


class Answer(NamedTuple):
    """From the child: the result of a job, whose batch is a ``Packed``."""

    epoch: int
    result: Result
    retired: tuple[int, ...]
    """The slabs that will not be used again, because they were too small."""
    done_ns: int
    """When the child sent it, by ``perf_counter_ns``, which is one clock for all processes."""


def pickle_of(answer: Answer) -> bytes:
    """Return the pickle of an answer. That of a batch alone has plain tuples: to find a class takes
    the loop's thread as long as all the rest."""
    result = answer.result
    if type(result) is not Loaded or result.progress is not None or result.tries is not None:
        return pickle.dumps(answer, 5)
    plain = answer.epoch, result.number, tuple(result.batch), answer.retired, answer.done_ns
    return pickle.dumps(plain, 5)


def message_of(content: Any) -> Any:
    """Return the message of a pickle. Raises: what a class in it raises when rebuilt."""
    message = pickle.loads(content)
    if type(message) is not tuple:
        return message
    epoch, number, packed, retired, done_ns = message
    return Answer(epoch, Loaded(number, Packed(*packed)), retired, done_ns)


class LogLine(NamedTuple):
    """From the child: a record of one of our loggers."""

    logger: str
    level: int
    text: str


class Fatal(NamedTuple):
    """From the child, its last message: why it cannot go on."""

    what: str
    error: PackedError
