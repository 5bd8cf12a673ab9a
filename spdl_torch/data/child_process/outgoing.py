"""What is sent to a worker process.

A message is written by whoever sends it, as far as it fits into the pipe. What does not fit (a job
with 100,000 indices, while the process is busy with another) goes to a thread, the sender, which
exists only then: neither the loop nor the receiver ever waits for the process to read.
"""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING

from ...engine.channel import Channel, ChannelClosed
from .messages import framed

if TYPE_CHECKING:
    from ...engine.threads import ThreadGroup

_MOST_UNSENT = 1_000_000


class Outgoing:
    """The messages to one process. Any thread may send; nobody waits for the process.

    Until the process takes them, they wait here: see :meth:`open`.
    """

    def __init__(self) -> None:
        # Re-entrant: a signal handler may send while the thread that it interrupted sends; its
        # message is refused. Guards all that follows but the sender's own; nobody who holds it
        # waits for the process.
        self._lock = threading.RLock()
        self._is_sending = False
        self._backlog: list[bytes] | None = []
        """Messages for a process that takes none yet; None = it does, or it has ended."""
        # The connection, while there is one. A non-blocking write, which the training thread makes
        # for each job, takes half the time of checking for room and then writing.
        self.outlet: socket.socket | None = None
        self._threads: ThreadGroup | None = None
        # Those that the sender is to write.
        self._unsent = Channel[bytes | memoryview](_MOST_UNSENT)
        self._num_unsent = 0  # with the one that it writes now
        self._has_sender = False
        # Held by the sender while it writes, which may take long, and for closing the connection.
        self._write_lock = threading.Lock()

    def open(self, outlet: socket.socket, threads: ThreadGroup, first: bytes | None) -> None:
        """Send to a process that takes messages: ``first``, if it is given, and then what waits for
        it. ``outlet``: the connection as a socket. ``threads``: has the sender's,
        if there will be one.
        """
        with self._lock:
            self.outlet, self._threads = outlet, threads
            waiting, self._backlog = self._backlog or (), None
            try:
                for content in waiting if first is None else (first, *waiting):
                    self._write(content)
            except OSError:
                pass  # the process has just ended

    def send(self, content: bytes) -> bool:
        """Send a message. If the process is gone, nothing happens: the receiver notices.

        Returns: False if the caller is a signal handler that interrupted this very method.
        Raises: what a signal handler raises, in the middle of the message: the process could not
            parse what follows.
        """
        with self._lock:
            if self._is_sending:
                return False
            self._is_sending = True
            try:
                if self._backlog is not None:
                    self._backlog.append(content)
                elif self.outlet is not None:
                    self._write(content)
            except TimeoutError:
                raise  # a signal handler's: nothing here waits
            except OSError:
                pass
            finally:
                self._is_sending = False
        return True

    def hang_up(self) -> None:
        """Send nothing more. Never blocks; safe in a finalizer."""
        self._unsent.close()

    def drop_backlog(self) -> None:
        """Forget what waits for a process that will never be up."""
        with self._lock:
            self._backlog = None

    def detach(self) -> None:
        """Let go of the connection, which is about to be closed, once the sender has written its
        last. Whoever calls this has ended the sender's wait for room.
        """
        with self._write_lock, self._lock:
            self.outlet = None

    def _write(self, message: bytes) -> None:
        """Write a message without waiting, and queue what does not fit. _lock is held."""
        assert self.outlet is not None, "guaranteed by the callers"
        content: bytes | memoryview = framed(message)
        if not self._num_unsent:
            try:
                num_written = self.outlet.send(content, socket.MSG_DONTWAIT)
            except BlockingIOError:
                num_written = 0
            if num_written == len(content):
                return
            content = memoryview(content)[num_written:]
        self._leave_to_sender(content)

    def _leave_to_sender(self, content: bytes | memoryview) -> None:
        assert self._threads is not None, "guaranteed by open()"
        if not self._has_sender:
            self._has_sender = True
            self._threads.spawn("sender", self._run_sender)
        try:
            self._unsent.put(content)
            self._num_unsent += 1
        except ChannelClosed:
            pass  # hung up

    def _run_sender(self) -> None:
        """Write messages, or what is left of one, in the order in which they were sent, each as
        soon as the process reads.
        """
        try:
            while True:
                content = self._unsent.get()
                with self._write_lock:
                    if self.outlet is None:
                        return
                    self.outlet.sendall(content)
                with self._lock:
                    self._num_unsent -= 1
        except (ChannelClosed, OSError):
            pass  # hung up, or the process is gone: the receiver notices
