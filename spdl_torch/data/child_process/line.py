"""The trainer's end of the line to one process: jobs go one way, batches the other; questions have
a pipe of their own.
"""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING, Any

from .messages import socket_of
from .outgoing import Outgoing
from .questions import Questions

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.context import BaseContext

    from ...engine.threads import ThreadGroup


class Line:
    """The pipes to a process, from when they are made to when they are closed.

    The receiver alone makes and closes them; any other thread may send, ask and hang up.
    """

    def __init__(self) -> None:
        self.outgoing = Outgoing()
        self.questions = Questions()
        self.connection: Connection | None = None
        self.control: Connection | None = None
        """The pipe for questions."""
        # Hang up through a socket of its own: its descriptor cannot have been reused meanwhile.
        self.hook: socket.socket | None = None
        """The connection as a socket."""
        self._lock = threading.RLock()  # re-entrant: a finalizer may hang up

    def open(self, context: BaseContext) -> tuple[Any, Any]:
        """Make the pipes, and return the process's ends."""
        self.connection, theirs = context.Pipe(duplex=True)
        self.control, control = context.Pipe(duplex=True)
        with self._lock:
            self.hook = socket_of(self.connection)
        return theirs, control

    def open_outgoing(self, threads: ThreadGroup, first: bytes | None = None) -> None:
        """Send from now on: ``first``, if it is given, and then what waits for that. ``threads``:
        has the sender's, if there will be one."""
        assert self.hook is not None, "guaranteed by the caller: it was opened"
        self.outgoing.open(self.hook, threads, first)

    def process_is_up(self, threads: ThreadGroup, first: bytes | None) -> None:
        """Send and ask from now on. ``first``: a message before all others; None = there is
        none."""
        assert self.control is not None, "guaranteed by the receiver: it was opened"
        self.open_outgoing(threads, first)
        self.questions.open(self.control)

    def end_waits(self) -> None:
        """End the waits of this side: nothing more is sent or asked. Never blocks; safe in a
        finalizer."""
        self.questions.hang_up()
        self.outgoing.hang_up()

    def hang_up(self) -> None:
        """End both sides' waits on the connection, which makes a living process end. Never blocks;
        safe in a finalizer."""
        with self._lock:
            hook = self.hook
        if hook is None:
            return
        try:
            hook.shutdown(socket.SHUT_RDWR)
        except (OSError, ValueError):
            pass  # the other side, or this one, closed it first

    def close(self) -> None:
        """Hang up, and close the pipes once nobody else writes there."""
        self.hang_up()  # ends a sender's wait for room, too
        self.outgoing.detach()
        self.questions.detach()
        hook, self.hook = self.hook, None
        own, self.connection = self.connection, None
        control, self.control = self.control, None
        for each in (own, control, hook):
            if each is not None:
                each.close()

    def forget(self) -> None:
        """Close a forked process's copies of them, which must end with the parent."""
        self.questions.forget()
        for each in (self.connection, self.control, self.hook):
            if each is not None:
                each.close()
