"""The trainer's end of the pipe, and the process at the other one.

One thread, the receiver, waits for the pipe and for the end of the process at once. It is the only
one that reads, and it reaps the process, so that neither a zombie nor a running child is left.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import socket
import threading
from multiprocessing import connection, reduction
from typing import TYPE_CHECKING, Any

from ...pipeline.channel import Channel, ChannelClosed
from .child import main
from .messages import Answer, Ask, Fatal, LogLine, Reply
from .portable import restored
from .start import interrupts_held

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.context import BaseContext

    from ...pipeline.threads import ThreadGroup
    from .child import Beginning
    from .portable import Portable
    from .slabs import Mappings

__all__ = ["Line"]

_END_SECONDS = 10.0  # of a child that was told to end; twice what it gives to its last samples

_NO_GUARD = (
    ' A script whose loop does not stand under `if __name__ == "__main__":` is run again by the '
    "child, and ends so."
)


class Line:
    """One child, from its start to its end.

    hear: called with every Answer, on the receiver's thread.
    ended: called when the child has ended, on that thread too.
    """

    def __init__(
        self,
        context: BaseContext,
        beginning: Beginning,
        mappings: Mappings,
        threads: ThreadGroup,
        hear: Callable[[Answer], None],
        ended: Callable[[], None],
    ) -> None:
        self.mappings = mappings
        self.is_over = False
        self._hear, self._ended = hear, ended
        self._threads = threads  # joined at exit, be the pool gone: until the child has ended
        self._has_spoken = False
        self._fatal: tuple[str, Portable] | None = None
        self._exit_code: int | None = None
        # Re-entrant, as a signal handler may ask while its thread sends or asks; it is told that
        # there is no answer then.
        self._send_lock = threading.RLock()
        self._ask_lock = threading.RLock()
        self._is_sending = self._is_asking = False
        self._replies = Channel[Reply](1_000)
        self._connection, theirs = context.Pipe(duplex=True)
        self._process = context.Process(  # type: ignore[attr-defined]
            target=main, args=(theirs, beginning), name="spdl-loader", daemon=True
        )
        try:
            with interrupts_held(context):
                self._process.start()
        except BaseException:
            self._connection.close()
            raise
        finally:
            theirs.close()
        self.pid: int = self._process.pid
        # A socket of its own to hang up with: its descriptor is never another's.
        self._hook = (
            socket.socket(fileno=os.dup(self._connection.fileno())) if os.name == "posix" else None
        )
        threads.spawn("receiver", self._run_receiver)

    # -- the trainer's threads -----------------------------------------------------------------

    def send(self, message: Any) -> bool:
        """Say it. If the child is gone, the receiver notices. False: the caller is a signal handler
        that has interrupted this very method.

        Raises: what pickle raises.
        """
        content = pickle.dumps(message, 5)
        try:
            with self._send_lock:
                if self._is_sending:
                    return False
                self._is_sending = True
                try:
                    self._connection.send_bytes(content)
                finally:
                    self._is_sending = False
        except OSError:
            pass
        except BaseException:  # Ctrl-C in the middle of a message: the child would not follow
            self.hang_up()
            raise
        return True

    def ask(self, question: str, argument: Any = None, *, timeout: float) -> Any:
        """The child's answer; None = it is gone, did not answer in that many seconds, or cannot be
        asked because the caller is a signal handler that came in between."""
        with self._ask_lock:
            if self._is_asking:
                return None
            self._is_asking = True
            try:
                while len(self._replies):
                    self._replies.get()  # to somebody who waited no longer
                if not self.send(Ask(question, argument)):
                    return None
                reply = self._replies.get(timeout)
                while reply.question != question:
                    reply = self._replies.get(timeout)
            except (ChannelClosed, TimeoutError):
                return None
            finally:
                self._is_asking = False
        return reply.value

    def hang_up(self) -> None:
        """Tell the child to end. Never blocks; safe in a finalizer."""
        self._replies.close()
        try:
            if self._hook is None:
                self._process.terminate()
            else:
                self._hook.shutdown(socket.SHUT_RDWR)
        except (OSError, ValueError):
            pass  # it has ended

    def forget(self) -> None:
        """In a forked process: the parent's line stays the parent's, and seen from the child it
        must end with the parent."""
        for each in (self._connection, self._hook):
            if each is not None:
                each.close()

    def death(self) -> BaseException:
        """Why the child ended without being told to; a new exception at each call."""
        if self._fatal is not None:
            what, error = self._fatal
            cause = restored(error)
            raised = RuntimeError(f"DataLoader: {what}: {type(cause).__name__}: {cause}")
            for note in getattr(cause, "__notes__", ()):
                raised.add_note(note)
            return raised
        return RuntimeError(
            f"DataLoader: the loading process (pid {self.pid}) {_describe_end(self._exit_code)}"
            f"{'' if self._has_spoken else _NO_GUARD}"
        )

    # -- the receiver --------------------------------------------------------------------------

    def _run_receiver(self) -> None:
        try:
            while True:
                ready = connection.wait([self._connection, self._process.sentinel])
                if self._connection not in ready and not self._connection.poll(0):
                    break
                self._take(pickle.loads(self._connection.recv_bytes()))
        except (EOFError, OSError):
            pass  # one side has hung up, or the child is gone
        finally:
            self._reap()

    def _take(self, message: Any) -> None:
        self._has_spoken = True
        if isinstance(message, Answer):
            packed = getattr(message.result, "batch", None)
            if packed is not None and packed.ticket is not None and packed.ticket.is_new:
                has_one = packed.ticket.tag is None
                descriptor = reduction.recv_handle(self._connection) if has_one else None
                self.mappings.open(packed.ticket, descriptor)
            self._hear(message)
        elif isinstance(message, Reply):
            try:
                self._replies.put(message)
            except ChannelClosed:
                pass
        elif isinstance(message, LogLine):
            logging.getLogger(message.logger).log(message.level, "%s", message.text)
        elif isinstance(message, Fatal):
            self._fatal = message.what, message.error
            self._connection.close()  # which ends the child
            raise EOFError

    def _reap(self) -> None:
        try:
            self._connection.close()
            if self._hook is not None:
                self._hook.close()
            self._process.join(_END_SECONDS)
            if self._process.exitcode is None:
                self._process.kill()
                self._process.join()
            self._exit_code = self._process.exitcode
            self._process.close()
        finally:
            self.is_over = True
            self.mappings.close()
            self._replies.close()
            self._ended()


def _describe_end(code: int | None) -> str:
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        often = (
            " The system does that to the process that takes the most memory when none is left; "
            "look at its log, and use fewer workers or smaller batches."
            if name == "SIGKILL"
            else " The dataset or a library that it uses has crashed there."
        )
        return f"was killed by {name}.{often}"
    return (
        f"ended by itself with exit code {code}: something in it called exit, or it could not be "
        "started; its last words are on stderr."
    )
