"""Questions to a worker process, by a pipe of their own: its worker reads the jobs itself."""

from __future__ import annotations

import pickle
import threading
from typing import TYPE_CHECKING, Any

from ...pipeline.channel.channel import Channel
from ...pipeline.channel.waits import ChannelClosed
from .messages import Ask

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from .messages import Reply

_MOST_REPLIES = 1_000


class Questions:
    """The questions to one process. Any thread may ask, one after the other."""

    def __init__(self) -> None:
        # Re-entrant: a signal handler may ask while the thread that it interrupted asks; it gets no
        # answer.
        self._lock = threading.RLock()
        self._is_asking = False
        self.pipe: Connection | None = None
        self._pipe_lock = threading.RLock()  # for one question, or to let go: nobody waits with it
        self.replies = Channel["Reply"](_MOST_REPLIES)

    def open(self, pipe: Connection) -> None:
        """Ask a process that is up."""
        self.pipe = pipe

    def ask(self, question: str, argument: Any = None, *, timeout: float) -> Any:
        """Ask the process and return its answer.

        None: it is not up or gone, it did not answer within ``timeout`` seconds, or the caller is a
        signal handler that interrupted another question.
        """
        with self._lock:
            if self._is_asking:
                return None
            self._is_asking = True
            try:
                while len(self.replies):
                    self.replies.get()  # a late answer, for a caller that has given up
                if not self._put(Ask(question, argument)):
                    return None
                reply = self.replies.get(timeout)
                while reply.question != question:
                    reply = self.replies.get(timeout)
            except (ChannelClosed, TimeoutError):
                return None
            finally:
                self._is_asking = False
        return reply.value

    def answered(self, reply: Reply) -> None:
        """Hand a reply to whoever waits for it."""
        try:
            self.replies.put(reply)
        except ChannelClosed:
            pass

    def hang_up(self) -> None:
        """End every wait for a reply. Never blocks; safe in a finalizer."""
        self.replies.close()

    def detach(self) -> None:
        """Let go of the pipe, which is about to be closed."""
        with self._pipe_lock:
            self.pipe = None

    def _put(self, message: Ask) -> bool:
        with self._pipe_lock:
            if self.pipe is None:
                return False
            try:
                self.pipe.send_bytes(pickle.dumps(tuple(message), 5))
            except OSError:
                return False
        return True
