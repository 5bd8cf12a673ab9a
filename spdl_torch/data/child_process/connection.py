"""The trainer's end of the pipe, and the process at the other end.

One thread, the receiver, starts the process, reads its messages and reaps it, so neither a zombie
nor a running child is left behind. Only the receiver handles the child's resources, and Ctrl-C is
never raised on it: if it comes while ``iter()`` waits for the start, nothing is left half done.

A forked child is started by the caller instead, as torch starts its workers: the child's main
thread is then a copy of the caller's, with the thread-local and context variables that the dataset
finds there (the precision of decimals, numpy's error handling, torch's grad mode). A copy of the
receiver would lack them; and what other threads keep in theirs is freed in the child, where a
library may wait for ever for threads that are not there. Signal handlers run after the start.
"""

from __future__ import annotations

import logging
import os
import pickle
import threading
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from ...engine.shared import LiveObjects, Once
from .child import main
from .ending import NO_GUARD, Ending
from .line import Line
from .messages import Answer, Arrivals, Fatal, LogLine, Up, receive_descriptor
from .process import ChildProcess, start_child
from .signals import handlers_deferred
from .start_methods import forks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.context import BaseContext

    from ...engine.threads import ThreadGroup
    from .child import Beginning
    from .mappings import Mappings

_END_SECONDS = 10.0  # for a child to end when asked; twice what it gives to its last samples

_MOST_LIVES = 3  # attempts, if a signal kills the child before it handles signals


class ChildConnection:
    """One child process, from its start to its end.

    hear: called with every Answer, on the receiver's thread.
    ended: called on the same thread when the child has ended.
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
        self.line = Line()
        self.is_up = False
        """Whether the child has said that it is ready for messages."""
        self.is_over = False
        self._context = context
        self._beginning: Beginning | None = beginning
        self._hear, self._ended = hear, ended
        # Released once the receiver has begun, and has tried to start a process. Not an Event:
        # Ctrl-C during its wait may leave its lock held, and the receiver would wait for ever to
        # set it.
        self._tried = threading.Lock()
        self._tried.acquire()
        self._has_tried = Once(self._tried.release)
        self._is_hung_up = False
        self.ending = Ending()
        self._child: ChildProcess | None = None
        self._threads: ThreadGroup | None = None
        _live.add(self)

    # Called on the trainer's threads:

    def start(self, threads: ThreadGroup, begin: Callable[[], None] | None) -> None:
        """Have the receiver start the child, and return when its process exists. The receiver calls
        ``begin`` first.

        Raises: as ``start_child``.
        """
        self._threads = threads  # keep them: the interpreter's exit waits for them
        threads.spawn("receiver", partial(self._run_receiver, begin))
        self._tried.acquire()
        if self._child is None and self.ending.broken is not None:
            try:
                raise self.ending.broken
            finally:
                self.ending.broken = None  # break the cycle: the error's traceback holds this frame

    def fork(self, threads: ThreadGroup) -> None:
        """Fork the child on this thread. Requires that ``listen`` follows, whatever happens.

        Raises: as ``start_child``.
        """
        self._threads = threads
        if self._start_process() is not None:
            # It reads them once it is up. To wait until it says so would be to wait until the loop
            # lets go of the GIL, which its receiver needs to hear that.
            self.line.open_outgoing(threads)

    def listen(self, begin: Callable[[], None] | None) -> None:
        """Start the receiver of a forked child; of one that was not forked, release all there is.

        Raises: RuntimeError: the system has no more threads; the child ends.
        """
        child, is_left_to_receiver = self._child, False
        try:
            if child is not None:
                assert self._threads is not None, "guaranteed by fork()"
                self._threads.spawn("receiver", partial(self._run_receiver, begin, child))
                is_left_to_receiver = True
                if begin is not None:
                    self._tried.acquire()  # it has called ``begin``
        finally:
            if not is_left_to_receiver:
                self.line.close()
                if child is not None:
                    self._reap(child)
                self._end()

    def send(self, message: Any) -> bool:
        """Send a message. If the child is gone, nothing happens here: the receiver notices.

        Returns: False if the caller is a signal handler that interrupted this very method.
        Raises: what pickle raises.
        """
        return self.say(pickle.dumps(message, 5))

    def say(self, content: bytes) -> bool:
        """Send a pickled message; see ``send``."""
        return self.line.outgoing.send(content)

    def hang_up(self) -> None:
        """Tell the child to end. Never blocks; safe in a finalizer."""
        self._is_hung_up = True  # before looking for the line: see _connect
        self.line.end_waits()
        self.line.hang_up()

    def forget(self) -> None:
        """Close this forked process's copy of the connection, which must end with the parent."""
        self.line.forget()
        if self._child is not None:
            self._child.forget()

    @property
    def pid(self) -> int:
        """The process's id; 0 = there is none yet."""
        return 0 if self._child is None else self._child.pid

    @property
    def was_killed(self) -> bool:
        """Whether the child, now ended, could start and was not ended by this program itself."""
        return self._could_start and not (self.ending.is_of_this_program or self._is_hung_up)

    @property
    def _could_start(self) -> bool:
        """Whether the child was up, or a signal ended it before."""
        return self.is_up or self.ending.is_by_signal

    def fail(self, error: BaseException) -> None:
        """Note why the process could not be started, for ``death``."""
        self.ending.broken = error

    def death(self) -> BaseException:
        """Return a new exception that says why the child ended unasked."""
        return self.ending.death(self.pid, could_start=self._could_start)

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
                if has_lived or not self.ending.may_be_a_trainers_signal:
                    break
        except BaseException as error:
            self.ending.broken = error
        finally:
            self._end()

    def _end(self) -> None:
        """Release what the child would have used, and report its end."""
        self.is_over = True
        self._has_tried()
        self._beginning = None
        self.line.outgoing.drop_backlog()
        self.mappings.close()
        self.line.end_waits()
        self._ended()

    def _live(self, child: ChildProcess | None) -> None:
        try:
            if child is None:
                child = self._start_process()
                self._has_tried()
            if child is not None:
                self._listen(child)
        finally:
            self.line.close()
            if self.is_up:
                self.mappings.close()  # which takes milliseconds: meanwhile the child ends
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
                "DataLoader: the worker process ended while it was sent what it begins with; its "
                f"last words are on stderr.{NO_GUARD}"
            ) from error
        finally:
            theirs.close()
            control.close()
        self._child = child
        return child

    def _connect(self) -> tuple[Any, Any]:
        theirs = self.line.open(self._context)
        # hang_up() on another thread sets the flag and then looks for the line; here that is opened
        # first and the flag read after, so at least one of the two sees the other. Both take the
        # line's lock in between: without a GIL a core may read before others see what it wrote.
        if self._is_hung_up:
            self.hang_up()
        return theirs

    def _listen(self, child: ChildProcess) -> None:
        """Read messages until one side hangs up, or the child is gone."""
        own = self.line.connection
        assert own is not None, "guaranteed by _connect"
        # The connection alone may never end: what the dataset forked may hold it open.
        arrivals = Arrivals(own, child.ends)
        while arrivals.wait():
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
                hook = self.line.hook
                assert hook is not None, "guaranteed by _connect"
                try:
                    descriptor = receive_descriptor(hook)
                except EOFError:
                    return False
                self.mappings.open(packed.ticket, descriptor)
            self._hear(message)
        elif isinstance(message, Up):
            self._up()
        elif isinstance(message, LogLine):
            logging.getLogger(message.logger).log(message.level, "%s", message.text)
        elif isinstance(message, Fatal):
            self.ending.fatal = message
            return False
        return True

    def _up(self) -> None:
        assert self._threads is not None, "guaranteed by start()"
        assert self._beginning is not None, "guaranteed by _live()"
        self.line.process_is_up(self._threads, self._beginning.spec.content)
        self.is_up, self._beginning = True, None

    def _reap(self, child: ChildProcess) -> None:
        # A child that was never up runs no user code, and may not notice that it is to end.
        is_up_or_ends = self.is_up or not self._is_hung_up
        if not (is_up_or_ends and child.join(_END_SECONDS)):
            child.kill()
            child.join(_END_SECONDS)
        self.ending.reaped(child)
        child.close()


def start_all(
    children: Sequence[ChildConnection],
    context: BaseContext,
    threads: ThreadGroup,
    begin: Callable[[], None] | None = None,
) -> None:
    """Start the children, and return when their processes exist. Each receiver calls ``begin``
    first.

    All are forked before the first receiver begins: it would want the GIL of the thread that forks,
    and be one more thread beside the next fork.

    Raises: as ``start_child``.
    """
    if not forks(context):
        for each in children:
            each.start(threads, begin)
        return
    with handlers_deferred(), ExitStack() as forked:
        for each in reversed(children):
            forked.callback(each.listen, begin)
        for each in children:
            each.fork(threads)


_live: LiveObjects[ChildConnection] = LiveObjects()


def _forget_parents_connections() -> None:
    """Close the connections in a forked process: they would keep its parent's children alive."""
    for each in _live.now():
        each.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_parents_connections)
