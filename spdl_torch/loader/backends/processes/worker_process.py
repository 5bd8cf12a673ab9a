"""One worker process of a loader as the trainer sees it, from its start to its end, and the jobs
that it has.

The loop's thread starts it, sends it jobs and reads what it answers; nobody else touches it, but
for ``hang_up``, which any thread may call. A signal's handler may raise at any instruction of all
that: it ends the iterator, and with its last reference each of these closes what it holds.
"""

from __future__ import annotations

import logging
import os
import pickle
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from time import monotonic, perf_counter_ns, sleep
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed

from ....engine.failures import notes_of, text_of
from ....handlers import unless_of_handler
from ....locks import LiveObjects, in_forked_child
from ...stats.counts import Readings
from .child import Beginning, main
from .error_pickle import unpack_error
from .page import Page
from .pickling import PickledSpec
from .process import NO_GUARD, ChildProcess, forks, start_child
from .shared_memory import Mappings
from .wire import Answer, Fatal, LogLine, Restart, Wire, message_of, socket_pair

if TYPE_CHECKING:
    from multiprocessing.context import BaseContext

    from ....io._transfer.region import LimitedLocker
    from ...checkpoint.epoch import Given
    from ..backend import LoadSpec
    from ..jobs import Epoch

_ASK_SECONDS = 2.0  # for an answer
_LOOK_SECONDS = 0.001  # between two looks for it
_COUNT_SECONDS = 0.1  # for what it counts once it has no job
_END_SECONDS = 10.0  # for a process whose wire has ended; twice what it gives to its last sample


_MOST_KEPT = 8
"""The number of batches that the loop may keep, besides those that wait for it, before more are
copied: enough for gradient accumulation or a prefetcher of the user's."""


class WorkerProcess:
    """A worker process; its number is that of its worker."""

    def __init__(
        self,
        number: int,
        spec: LoadSpec,
        context: BaseContext,
        epoch: Epoch,
        *,
        locker: LimitedLocker | None,
        num_lives: int,
    ) -> None:
        """``locker``: locks the pages of its slabs; None = they stay pageable. ``num_lives``: how
        many processes have tried to be this worker, with this one."""
        self.number = number
        self.num_lives = num_lives
        self.jobs: dict[int, Given] = {}
        """The jobs that it has not answered, in the order in which it got them."""
        self.num_answered = 0
        """The number of jobs of this epoch that it has answered."""
        self.epoch = -1
        """The number of epochs begun in it after the first."""
        self.page = Page.new()
        self.mappings = Mappings(
            spec.max_outstanding + _MOST_KEPT, lock=None if locker is None else locker.region
        )
        self.is_over = False
        """Whether nothing comes from it any more."""
        self.is_hung_up = False
        self.fault: Fatal | BaseException | None = None
        """The process's own last words; or why it could not be started, or what it sent not be
        received. None = it has neither."""
        self._process: ChildProcess | None = None
        ours, theirs = socket_pair()
        self.wire = Wire(ours)
        self._guard, asked = socket_pair()
        is_forked = forks(context)
        opener: Any = (lambda: spec) if is_forked else PickledSpec(spec)
        environment = None if is_forked else _environment()
        dtype = torch.get_default_dtype()
        beginning = Beginning(self.page, opener, number, dtype, environment)
        self._theirs: tuple[Any, Any, BaseContext, Beginning] | None
        self._theirs = theirs, asked, context, beginning
        self.restart(epoch)
        _live.add(self)

    def start(self) -> None:
        """Start the process. Raises: as ``start_child``."""
        theirs, self._theirs = self._theirs, None
        if theirs is None or self.is_hung_up:
            return  # ``iter()`` was interrupted before
        end, asked, context, beginning = theirs
        try:
            self._process = start_child(context, main, (end, asked, beginning))
        except BrokenPipeError as error:
            raise RuntimeError(
                "DataLoader: the worker process ended while it was sent what it begins with; its "
                f"last words are on stderr.{NO_GUARD}"
            ) from error
        finally:
            end.close()
            asked.close()
            self.page.has_arrived()
        if self.is_hung_up:  # meanwhile, by another thread
            self.hang_up()

    @property
    def pid(self) -> int:
        """The process's id; 0 = there is none yet."""
        return 0 if self._process is None else self._process.pid

    @property
    def ends(self) -> list[int]:
        """The descriptors that become readable when the process has sent something, or has ended.
        Its end is not always that of the wire: what the dataset forked may hold that open."""
        process = [] if self._process is None else self._process.ends
        return [self.wire.socket.fileno(), *process]

    # Jobs:

    def submit(self, job: Given) -> Exception | None:
        """Give the child a job, and with it the slabs that are free. Return what pickle raises;
        None = it is sent.

        It is sent as a plain tuple, with the two fields of a ``Free`` after its own: the thread
        that trains sends one for each batch, and a named tuple is pickled by calls of Python code.
        """
        freed = self.mappings.freed()
        try:
            content = pickle.dumps((*job, *freed), 5)
        except unless_of_handler(Exception) as error:
            if any(freed):
                self.send(freed)  # nobody reports them again
            return error
        # Noted first: sending to a child that has just died raises nothing, and what is noted is
        # made again.
        self.jobs[job.number] = job
        self.wire.send(content)
        return None

    def send(self, message: Any) -> None:
        """Send a message, which one that has yet to be started finds then. Never waits."""
        self.wire.say(message)

    def restart(self, epoch: Epoch) -> None:
        """Begin another epoch: outstanding jobs are dropped."""
        self.epoch += 1
        self.num_answered = 0
        self.jobs.clear()
        self.send(Restart(self.epoch, epoch.key, epoch.workers))

    # Answers:

    def heard(self, *, has_ended: bool) -> Iterator[Answer]:
        """Read what the process has sent, and yield its answers. When nothing comes any more,
        ``is_over`` is set. ``has_ended``: it is gone, and so all that it sent is there."""
        wire = self.wire
        wire.read()
        try:
            while (found := wire.next()) is not None:
                answer = self._taken(message_of(found[0]), found[1])
                if answer is not None:
                    yield answer
        except unless_of_handler(Exception) as error:  # what it sent cannot be received
            self.fault = error
        self.is_over = has_ended or wire.is_over or self.fault is not None

    def _taken(self, message: Any, files: list[Any]) -> Answer | None:
        if isinstance(message, Answer):
            packed: Any = getattr(message.result, "batch", None)
            for file in files:
                self.mappings.open(packed.slab, packed.size, file)
            self.mappings.forget(message.retired)
            return message
        if isinstance(message, LogLine):
            logging.getLogger(message.logger).log(message.level, "%s", message.text)
        elif isinstance(message, Fatal):
            self.fault = message
        return None

    # What it does, at any time:

    @property
    def readings(self) -> Readings | None:
        """What it has counted in this epoch; None = nothing yet. All but the tasks may be 0.2 s
        old; where it has no job, it is about to write that as well: waits for it, a moment."""
        end = monotonic() + _COUNT_SECONDS
        while True:
            num_counted, others = self.page.counts(self.epoch)
            is_whole = num_counted >= self.num_answered or self.is_over
            if is_whole or self.jobs or monotonic() > end:
                break
            sleep(_LOOK_SECONDS / 10)
        tasks = self.page.tasks(self.epoch)
        return None if tasks is None or others is None else Readings(*tasks, *others)

    @property
    def has_recorded(self) -> bool:
        """Whether its ring is of this epoch, and its worker has begun."""
        ring = self.page.ring
        return ring.epoch == self.epoch and bool(ring.thread_id)

    @property
    def waited_ns(self) -> int:
        """For how long it has had no job."""
        since_ns = 0 if self.is_over else self.page.idle_since_ns
        return perf_counter_ns() - since_ns if since_ns else 0

    def at_work(self) -> str:
        """Ask what is at work in it, and return that. Any thread may ask, also in a signal's
        handler: nobody waits for another one."""
        num_said, end = self.page.said.turn, monotonic() + _ASK_SECONDS
        is_asked = self.page.is_up
        with suppress(OSError):  # it is gone, or was asked too often
            if is_asked:
                self._guard.send(b"?", socket.MSG_DONTWAIT)
            while is_asked and not self.is_over and monotonic() < end:
                if self.page.said.turn != num_said:
                    return self.page.said.read().decode(errors="replace")
                sleep(_LOOK_SECONDS)
        return (
            f"The worker process (pid {self.pid}) is being started, or did not answer within "
            f"{_ASK_SECONDS:g} s because native code there keeps the GIL."
        )

    # Its end:

    def hang_up(self) -> None:
        """Tell the process to end, within 5 s. Never blocks; safe in a finalizer, on any thread."""
        self.is_hung_up = True
        self._guard.hang_up()
        self.wire.socket.hang_up()
        if self._process is not None:
            self._process.end_soon()

    def reap(self) -> None:
        """Wait for a process from which nothing comes any more, and note how it ended."""
        if self._process is None:
            return
        if isinstance(self.fault, BaseException):
            self.hang_up()  # it lives, and would wait for jobs
        if not self._process.join(_END_SECONDS):
            self._process.kill()
            self._process.join(_END_SECONDS)
        self._process.close()

    @property
    def was_killed(self) -> bool:
        """Whether the process, now ended, could start and was not ended by this program itself."""
        return self._could_start and self._is_unasked

    @property
    def may_try_again(self) -> bool:
        """Whether another process may try: a signal for the trainer killed this one before it had
        handlers. (Signals that a forked one gets while it is being started wait for its own.)"""
        is_new = self._is_unasked and not self.page.is_up and self.num_lives < _MOST_LIVES
        process = self._process
        return is_new and process is not None and process.may_be_a_trainers_signal

    @property
    def _is_unasked(self) -> bool:
        """Whether a signal from elsewhere has ended it, and neither itself nor this program."""
        process = self._process
        was_terminated = process is not None and process.was_terminated
        return not (self.is_hung_up or self.fault is not None or was_terminated)

    @property
    def _could_start(self) -> bool:
        code = None if self._process is None else self._process.exit_code
        return bool(self.page.is_up) or (code is not None and code < 0)

    def death(self) -> BaseException:
        """Return a new exception that says why the process ended unasked."""
        fault, where = self.fault, f"the worker process (pid {self.pid})"
        if isinstance(fault, Fatal):
            return _raised_by(fault)
        if fault is None:
            assert self._process is not None, "guaranteed by start(): else that is its fault"
            end = self._process.how_it_ended()
            without_guard = "" if self._could_start else NO_GUARD
            return RuntimeError(f"DataLoader: {where} {end}{without_guard}")
        raised = RuntimeError(
            f"DataLoader: this process could not receive what {where} sent: "
            f"{type(fault).__name__}: {fault}"
        )
        raised.__cause__ = fault
        return raised

    def forget(self) -> None:
        """Close this forked process's copies, which must end with the parent."""
        self.wire.close()
        self._guard.close()
        if self._process is not None:
            self._process.forget()
            self._process = None

    def close(self) -> None:
        """Hang up, and close this end."""
        self.hang_up()
        self.wire.close()
        self._guard.close()
        self._theirs = None  # whose sockets are closed by that

    def __del__(self, is_exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        if hasattr(self, "_theirs") and not is_exiting():
            self.close()


_MOST_LIVES = 3

_live: LiveObjects[WorkerProcess] = LiveObjects()


@in_forked_child
def _forget_parents_processes() -> None:
    """Close the wires in a forked process: they would keep its parent's children alive."""
    for each in _live.now():
        each.forget()


def _raised_by(fatal: Fatal) -> RuntimeError:
    """Return the exception for a process that has said why it cannot go on."""
    cause = unpack_error(fatal.error)
    raised = RuntimeError(f"DataLoader: {fatal.what}: {text_of(cause)}")
    raised.__cause__ = cause
    for note in notes_of(cause):
        raised.add_note(note)
    return raised


def _environment() -> dict[str, str]:
    """Return the environment with this process's rank and world size: datasets that divide
    themselves among ranks read them, as the child has no process group."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return dict(os.environ)
    rank, world = distributed.get_rank(), distributed.get_world_size()
    return {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(world)}
