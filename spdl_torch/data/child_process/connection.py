"""The trainer's end of the pipe, and the process at the other end.

One thread, the receiver, starts the process, reads its messages and reaps it, so neither a zombie
nor a running child is left behind. Only the receiver handles the child's resources, and Ctrl-C is
never raised on it: if it comes while ``iter()`` waits for the start, nothing is left half done.

A forked child is started by the caller instead, as torch starts its workers: the child's main
thread is then a copy of the caller's, with the thread-local and context variables that the dataset
finds there (the precision of decimals, numpy's error handling, torch's grad mode). A copy of the
receiver would lack them; and what other threads keep in theirs is freed in the child, where a
library may wait for ever for threads that are not there. Signal handlers run after the start.

A message is written by whoever sends it, as far as it fits into the pipe. What does not fit (a job
with 100,000 indices, while the child is busy with another) goes to a second thread, the sender,
which exists only then: neither the loop nor the receiver ever waits for the child to read.
"""

from __future__ import annotations

import errno
import logging
import os
import pickle
import signal
import socket
import threading
from functools import partial
from multiprocessing import connection, reduction
from typing import TYPE_CHECKING, Any

from ...pipeline.channel.channel import Channel
from ...pipeline.channel.waits import ChannelClosed
from ...pipeline.failures import text_of
from ...pipeline.threads.shared_state import LiveObjects
from .child import main
from .error_pickle import unpack_error
from .framing import framed, socket_of
from .messages import Answer, Ask, Fatal, LogLine, Reply, Up
from .process import ChildProcess, start_child
from .signals import TRAINERS, handlers_deferred
from .start_methods import forks

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from multiprocessing.context import BaseContext

    from ...pipeline.threads.thread_group import ThreadGroup
    from .child import Beginning
    from .error_pickle import PackedError
    from .shared_memory import Mappings

_END_SECONDS = 10.0  # for a child to end when asked; twice what it gives to its last samples

_MOST_LIVES = 3  # attempts, if a signal kills the child before it handles signals

_MOST_UNSENT = 1_000_000

_NO_GUARD = (
    ' The child runs a script again whose loop is not under `if __name__ == "__main__":`, and ends '
    "this way."
)


class ChildConnection:
    """One child process, from its start to its end.

    hear: called with every Answer, on the receiver's thread.
    ended: called on the same thread when the child has ended.

    The child's worker reads the jobs itself, so questions go by a pipe of their own.
    """

    def __init__(
        self,
        context: BaseContext,
        beginning: Beginning,
        mappings: Mappings,
        hear: Callable[[Answer], None],
        ended: Callable[[], None],
    ) -> None:
        self.mappings = mappings
        self.is_over = False
        self.pid = 0
        self._context = context
        self._beginning: Beginning | None = beginning
        self._hear, self._ended = hear, ended
        # Released once the receiver has begun, and has tried to start a process. Not an Event:
        # Ctrl-C during its wait may leave its lock held, and the receiver would wait for ever to
        # set it.
        self._tried = threading.Lock()
        self._tried.acquire()
        self._was_tried = False
        self.is_up = False
        """Whether the child has said that it is ready for messages."""
        self._is_hung_up = False
        self._fatal: tuple[str, PackedError] | None = None
        self._broken: BaseException | None = None
        self._exit_code: int | None = None
        self._was_terminated = False
        self._is_cut_off = False  # by Ctrl-C in the middle of a message
        self._connection: Connection | None = None
        self._control: Connection | None = None  # for questions
        # If there is one, messages are written to it: a non-blocking write, which the training
        # thread makes for each job, takes half the time of checking for room and then writing.
        self._outlet: socket.socket | None = None
        self._hook: socket.socket | None = None
        self._hook_lock = threading.RLock()  # re-entrant: a finalizer may hang up
        self._child: ChildProcess | None = None
        self._threads: ThreadGroup | None = None
        self._backlog: list[bytes] = []  # messages for a child that is not up yet
        self._unsent = Channel[bytes](_MOST_UNSENT)  # those that the sender is to write
        self._num_unsent = 0  # with the one that it writes now
        self._has_sender = False
        # Re-entrant: a signal handler may ask while the thread that it interrupted sends or asks;
        # it then gets no answer. _send_lock also guards _backlog, _num_unsent and closing; nobody
        # who holds it waits for the child.
        self._send_lock = threading.RLock()
        # Held by the sender while it writes, which may take long, and for closing the connection.
        self._write_lock = threading.Lock()
        self._ask_lock = threading.RLock()
        self._is_sending = self._is_asking = False
        self._replies = Channel[Reply](1_000)
        _live.add(self)

    # Called on the trainer's threads:

    def start(self, threads: ThreadGroup, begin: Callable[[], None] | None = None) -> None:
        """Start the child, and return when its process exists. The receiver calls ``begin`` first.

        Raises: as ``start_child``.
        """
        self._threads = threads  # keep them: the interpreter's exit waits for them
        if forks(self._context):
            with handlers_deferred():
                self._start_forked(threads, begin)
            return
        threads.spawn("receiver", partial(self._run_receiver, begin))
        self._tried.acquire()
        if self._child is None and self._broken is not None:
            try:
                raise self._broken
            finally:
                self._broken = None  # break the cycle: the error's traceback holds this frame

    def _start_forked(self, threads: ThreadGroup, begin: Callable[[], None] | None) -> None:
        """Fork the child on this thread, and start its receiver."""
        child, is_left_to_receiver = None, False
        try:
            child = self._start_process()
            if child is not None:
                threads.spawn("receiver", partial(self._run_receiver, begin, child))
                is_left_to_receiver = True
                self._tried.acquire()  # it has called ``begin``
        finally:
            if not is_left_to_receiver:
                self._disconnect()
                if child is not None:
                    self._reap(child)
                self._end()

    def send(self, message: Any) -> bool:
        """Send a message. If the child is gone, nothing happens here: the receiver notices.

        Returns: False if the caller is a signal handler that interrupted this very method.
        Raises: what pickle raises.
        """
        content = pickle.dumps(message, 5)
        try:
            with self._send_lock:
                if self._is_sending:
                    return False
                self._is_sending = True
                try:
                    self._say(content)
                finally:
                    self._is_sending = False
        except OSError:
            pass
        except BaseException:  # Ctrl-C mid-message: the child could not parse what follows
            self._is_cut_off = True
            self.hang_up()
            raise
        return True

    def _say(self, content: bytes) -> None:
        """Write a message without waiting, and queue what does not fit. _send_lock is held."""
        if not self.is_up or self._connection is None:
            if not self.is_over:
                self._backlog.append(content)
            return
        outlet = self._outlet
        if outlet is not None:
            content = framed(content)
            if not self._num_unsent:
                try:
                    num_written = outlet.send(content, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    num_written = 0
                if num_written == len(content):
                    return
                content = content[num_written:]
        self._leave_to_sender(content)

    def _leave_to_sender(self, content: bytes) -> None:
        assert self._threads is not None, "guaranteed by start(): the child is up"
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
        soon as the child reads.
        """
        try:
            while True:
                content = self._unsent.get()
                with self._write_lock:
                    if self._connection is None:
                        return
                    if self._outlet is None:
                        self._connection.send_bytes(content)
                    else:
                        self._outlet.sendall(content)
                with self._send_lock:
                    self._num_unsent -= 1
        except (ChannelClosed, OSError):
            pass  # hung up, or the child is gone: the receiver notices

    def ask(self, question: str, argument: Any = None, *, timeout: float) -> Any:
        """Ask the child and return its answer.

        None: the child is gone or did not answer within ``timeout`` seconds, or the caller is a
        signal handler that interrupted another question.
        """
        with self._ask_lock:
            if self._is_asking or self._threads is None:  # not started yet
                return None
            self._is_asking = True
            try:
                while len(self._replies):
                    self._replies.get()  # a late answer, for a caller that has given up
                if not self._put_question(Ask(question, argument)):
                    return None
                reply = self._replies.get(timeout)
                while reply.question != question:
                    reply = self._replies.get(timeout)
            except (ChannelClosed, TimeoutError):
                return None
            finally:
                self._is_asking = False
        return reply.value

    def _put_question(self, message: Ask) -> bool:
        with self._send_lock:
            if not self.is_up or self._control is None:
                return False
            try:
                self._control.send_bytes(pickle.dumps(tuple(message), 5))
            except OSError:
                return False
        return True

    def hang_up(self) -> None:
        """Tell the child to end. Never blocks; safe in a finalizer."""
        self._is_hung_up = True  # before looking for a hook: see _connect
        self._replies.close()
        self._unsent.close()
        with self._hook_lock:
            hook, child = self._hook, self._child
        try:
            if hook is not None:
                hook.shutdown(socket.SHUT_RDWR)
            elif child is not None and os.name != "posix":
                # On POSIX, no hook means that the connection is closed, and the child knows: it has
                # some seconds for the samples that it is fetching. Elsewhere there is never a hook.
                child.kill()
        except (OSError, ValueError):
            pass  # it has ended

    def forget(self) -> None:
        """Close this forked process's copy of the connection, which must end with the parent."""
        for each in (self._connection, self._control, self._hook):
            if each is not None:
                each.close()
        if self._child is not None:
            self._child.forget()

    @property
    def is_ending(self) -> bool:
        """Whether the child has ended, or was told to: it answers nothing more."""
        return self.is_over or self._is_hung_up

    @property
    def was_killed(self) -> bool:
        """Whether the child, now ended, could start and was not ended by this program itself."""
        at_fault = self._fatal or self._broken or self._is_cut_off or self._was_terminated
        return self._could_start and not at_fault and not self._is_hung_up

    @property
    def _could_start(self) -> bool:
        """Whether the child was up, or a signal ended it before."""
        return self.is_up or (self._exit_code is not None and self._exit_code < 0)

    def fail(self, error: BaseException) -> None:
        """Note why the process could not be started, for ``death``."""
        self._broken = error

    def death(self) -> BaseException:
        """Return a new exception that says why the child ended unasked."""
        if self._fatal is not None:
            what, error = self._fatal
            cause = unpack_error(error)
            raised = RuntimeError(f"DataLoader: {what}: {text_of(cause)}")
            raised.__cause__ = cause
            for note in getattr(cause, "__notes__", ()):
                raised.add_note(note)
            return raised
        where = f"the worker process (pid {self.pid})"
        if self._broken is not None:
            raised = RuntimeError(
                f"DataLoader: this process could not receive what {where} sent: "
                f"{type(self._broken).__name__}: {self._broken}"
            )
            raised.__cause__ = self._broken
            return raised
        if self._is_cut_off:
            return RuntimeError(
                f"DataLoader: {where} was stopped because Ctrl-C came in the middle of a message "
                "to it. Call iter(loader) again; state_dict() says where the epoch stands."
            )
        if self._was_terminated:
            return RuntimeError(
                f"DataLoader: {where} was ended by Process.terminate(), which something in this "
                "program called. When ending multiprocessing.active_children(), leave out those "
                'named "spdl-loader".'
            )
        end = _describe_end(self._exit_code)
        return RuntimeError(f"DataLoader: {where} {end}{'' if self._could_start else _NO_GUARD}")

    # Called on the receiver's thread:

    def _run_receiver(
        self, begin: Callable[[], None] | None, forked: ChildProcess | None = None
    ) -> None:
        """Run the receiver. ``forked``: the child, if the caller has started it."""
        try:
            if begin is not None:
                begin()
            if forked is not None:
                self._has_tried()
            for _ in range(_MOST_LIVES):
                self._live(forked)
                # Signals that a forked child gets while it is being started wait for its handlers.
                has_lived = self.is_up or self._is_hung_up or forked is not None
                if has_lived or not self._met_a_signal():
                    break
        except BaseException as error:
            self._broken = error
        finally:
            self._end()

    def _end(self) -> None:
        """Release what the child would have used, and report its end."""
        self.is_over = True
        self._has_tried()
        self._beginning = None
        self._backlog.clear()
        self.mappings.close()
        self._replies.close()
        self._unsent.close()
        self._ended()

    def _live(self, child: ChildProcess | None) -> None:
        try:
            if child is None:
                child = self._start_process()
                self._has_tried()
            if child is not None:
                self._listen(child)
        finally:
            self._disconnect()
            if child is not None:
                self._reap(child)

    def _start_process(self) -> ChildProcess | None:
        """Start the process; None = ``iter()`` was interrupted before."""
        theirs, control = self._connect()
        try:
            if self._is_hung_up:
                return None
            child = start_child(self._context, main, (theirs, control, self._beginning))
        except BrokenPipeError as error:
            raise RuntimeError(
                "DataLoader: the worker process ended while it was sent the dataset; its last "
                f"words are on stderr.{_NO_GUARD}"
            ) from error
        finally:
            theirs.close()
            control.close()
        self._child, self.pid = child, child.pid
        return child

    def _has_tried(self) -> None:
        if not self._was_tried:
            self._was_tried = True
            self._tried.release()

    def _connect(self) -> tuple[Any, Any]:
        self._connection, theirs = self._context.Pipe(duplex=True)
        control, self._control = self._context.Pipe(duplex=False)
        # Hang up through a socket of its own: its descriptor cannot have been reused meanwhile.
        with self._hook_lock:
            self._hook = self._outlet = socket_of(self._connection)
        # hang_up() on another thread sets the flag and then looks for a hook; here the hook is set
        # first and the flag read after, so at least one of the two sees the other. Both take the
        # lock in between: without a GIL a core may read before others see what it wrote.
        if self._is_hung_up:
            self.hang_up()
        return theirs, control

    def _listen(self, child: ChildProcess) -> None:
        """Read messages until one side hangs up, or the child is gone."""
        own = self._connection
        assert own is not None, "guaranteed by _connect"
        while True:
            # The connection alone may never end: what the dataset forked may hold it open.
            ready = connection.wait([own, *child.ends])
            if own not in ready and not own.poll(0):
                return
            try:
                content = own.recv_bytes()
            except (EOFError, OSError):
                return
            if not self._take(pickle.loads(content)):
                return

    def _take(self, message: Any) -> bool:
        """Handle a message. Return False if nothing may follow."""
        if isinstance(message, Answer):
            packed = getattr(message.result, "batch", None)
            if packed is not None and packed.ticket is not None and packed.ticket.is_new:
                try:
                    descriptor = None if self._outlet is None else _descriptor_from(self._outlet)
                except EOFError:
                    return False
                self.mappings.open(packed.ticket, descriptor)
            self._hear(message)
        elif isinstance(message, Up):
            self._up()
        elif isinstance(message, Reply):
            try:
                self._replies.put(message)
            except ChannelClosed:
                pass
        elif isinstance(message, LogLine):
            logging.getLogger(message.logger).log(message.level, "%s", message.text)
        elif isinstance(message, Fatal):
            self._fatal = message.what, message.error
            return False
        return True

    def _up(self) -> None:
        with self._send_lock:
            self.is_up, self._beginning = True, None
            try:
                for content in self._backlog:
                    self._say(content)
            except OSError:
                pass  # the child has just ended
            self._backlog.clear()

    def _disconnect(self) -> None:
        """Close the connection, which makes a living child end."""
        hook, self._hook = self._hook, None
        if hook is not None:
            try:
                hook.shutdown(socket.SHUT_RDWR)  # ends a sender's wait for room, too
            except OSError:
                pass  # the other side closed it first
        with self._write_lock, self._send_lock:
            own, self._connection, self._outlet = self._connection, None, None
            control, self._control = self._control, None
            for each in (own, control, hook):
                if each is not None:
                    each.close()

    def _reap(self, child: ChildProcess) -> None:
        # A child that was never up runs no user code, and may not notice that it is to end.
        is_up_or_ends = self.is_up or not self._is_hung_up
        if not (is_up_or_ends and child.join(_END_SECONDS)):
            child.kill()
            child.join(_END_SECONDS)
        self._exit_code, self._was_terminated = child.exit_code(), child.was_terminated
        child.close()

    def _met_a_signal(self) -> bool:
        """Return whether a signal may have killed the child before it left signals to the trainer.

        A fork server's child cannot be protected from that, but nothing is lost, as it has not
        answered yet. If the signal also killed the server, the exit code is unknown.
        """
        return self._exit_code is None or -self._exit_code in TRAINERS


_live: LiveObjects[ChildConnection] = LiveObjects()


def _forget_parents_connections() -> None:
    """Close the connections in a forked process: they would keep its parent's children alive."""
    for each in _live.now():
        each.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_parents_connections)


def _descriptor_from(source: socket.socket) -> int:
    """Receive a descriptor. Raises: EOFError: the child is gone; OSError: it was not received."""
    try:
        return reduction.recvfds(source, 1)[0]
    except ConnectionResetError as error:  # a job that it had not read yet was lost
        raise EOFError from error
    except RuntimeError as error:  # this process had no free descriptor for it
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE)) from error


def _describe_end(code: int | None) -> str:
    if code is None:
        return (
            "has ended with exit code 255, or in a way that only multiprocessing's fork server "
            "knew, which has ended too."
        )
    if code >= 0:
        return (
            f"ended by itself with exit code {code}: something in it called exit, or it could not "
            "be started; its last output is on stderr."
        )
    name = _signal_name(-code)
    if name == "SIGKILL":
        often = (
            "The system kills the largest process when memory runs out: look at its log, and use "
            "fewer workers or smaller batches."
        )
    elif -code in TRAINERS:
        often = "Something sent it that signal while it was being started."
    else:
        often = "The dataset or a library that it uses has crashed there."
    return f"was killed by {name}. {often}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # those between SIGRTMIN and SIGRTMAX have no names
        return f"signal {number}"
