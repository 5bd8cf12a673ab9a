"""The loading process: a WorkerPool between two ends of a pipe.

Its main thread only reads the trainer's messages, so it notices at once when the trainer is gone,
whatever the workers do. Another thread, the sender, makes the pool and sends its results.
"""

from __future__ import annotations

import atexit
import logging
import os
import pickle
import sys
import threading
from dataclasses import replace
from functools import partial
from multiprocessing import reduction
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ...errors import PipelineStopped
from ...pipeline.channel.channel import Channel, ChannelClosed
from ..error_notes import Reason
from ..workers.jobs import Failed, Loaded
from ..workers.worker_pool import WorkerPool
from .batch_packing import PackedBatch, pack
from .error_pickle import pack_error, pack_errors_of
from .messages import Answer, Ask, Fatal, Free, LogLine, Reply, Restart, Submit, Up
from .shared_memory import SlabPool
from .signals import leave_to_the_trainer

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.connection import Connection

    from ..checkpoint.resume_state import WorkerState
    from ..rng.keys import StreamKey
    from ..workers.jobs import Result
    from ..workers.load_spec import LoadSpec

__all__ = ["Beginning", "main"]

_FINISH_SECONDS = 5.0  # for the samples that are being fetched when the trainer hangs up

_READINGS_NS = 100_000_000  # least time between readings sent; the last batch always has one

_MOST_RESTARTS = 1_000


class Beginning(NamedTuple):
    """The arguments with which the child is started."""

    spec: Any
    key: StreamKey
    workers: Sequence[WorkerState]
    default_dtype: torch.dtype
    """torch's default dtype in the trainer, which worker threads there would use."""
    environment: dict[str, str]
    """The trainer's environment, and its rank: a fork server's children have the environment of
    the server's start."""


def main(line: Connection, beginning: Beginning) -> None:
    """Run until the trainer hangs up, or is gone; then end the process."""
    leave_to_the_trainer()
    if hasattr(os, "register_at_fork"):
        # A process that the dataset forks must not hold the line open: the trainer would not see
        # the child's end.
        os.register_at_fork(after_in_child=line.close)
    Child(line, beginning).run()
    # Skip the interpreter's teardown: threads may still be inside user code, and would crash.
    getattr(atexit, "_run_exitfuncs", int)()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(0)


class Child:
    """The pool, the messages that wait for it, and the way back to the trainer."""

    def __init__(self, line: Connection, beginning: Beginning) -> None:
        self._line = line
        self._beginning = beginning
        self._slabs = SlabPool()
        # Held while writing to the line. Re-entrant: sending may log, and log lines are sent too.
        self._send_lock = threading.RLock()
        # Guards _pool and _backlog: a message goes to the backlog or to the pool, never to neither.
        self._pool_lock = threading.Lock()
        self._pool: WorkerPool | None = None
        self._backlog: list[Submit | Restart | Free] = []  # messages before there was a pool
        self._restarts = Channel[Restart](_MOST_RESTARTS)
        self._restarted = threading.Semaphore(0)
        self._epoch = 0
        self._num_submitted = self._num_sent = 0
        self._readings_ns = 0

    def run(self) -> None:
        """Read messages until the other end is closed. Runs on the main thread."""
        logger = logging.getLogger("spdl_torch")
        logger.addHandler(_ToTrainer(self))
        logger.propagate = False
        self.send(Up())
        sender = threading.Thread(target=self._run_sender, name="spdl-sender", daemon=True)
        sender.start()
        try:
            while True:
                self._hear(pickle.loads(self._line.recv_bytes()))
        except (EOFError, OSError):
            pass  # the trainer has hung up, or is gone
        except BaseException as error:
            self._tell_fatal("the loading process could not handle a message", error)
        self._restarts.close()
        if self._pool is not None:
            self._pool.stop(_FINISH_SECONDS)
            sender.join(_FINISH_SECONDS)

    # -- the main thread -----------------------------------------------------------------------

    def _hear(self, message: Any) -> None:
        if isinstance(message, Ask):
            self.send(Reply(message.question, self._reply(message)))
            return
        with self._pool_lock:
            pool = self._pool
            if pool is None:
                self._backlog.append(message)
                return
        if isinstance(message, Restart):
            # The sender does the restart, so that it knows the epoch of each result. interrupt()
            # wakes it from pool.get(); wait here until it is done: the next jobs are for the new
            # epoch.
            pool.interrupt()
            self._restarts.put(message)
            self._restarted.acquire()
        else:
            self._obey(pool, message)

    def _obey(self, pool: WorkerPool, message: Submit | Restart | Free) -> None:
        if isinstance(message, Restart):
            pool.restart(message.key, message.workers)
            self._epoch, self._num_submitted, self._num_sent = message.epoch, 0, 0
        elif isinstance(message, Free):
            self._free(message)
        else:
            self._free(message.freed)
            self._num_submitted += 1
            number, index, worker, first, wants_state, _ = message
            pool.submit(number, index, worker, first, wants_state=wants_state)

    def _free(self, freed: Free) -> None:
        for slab in freed.slabs:
            self._slabs.give_back(slab)
        for slab in freed.spent:
            self._slabs.drop(slab)

    def _reply(self, message: Ask) -> Any:
        pool = self._pool
        if pool is None:
            return None
        try:
            if message.question == "at_work":
                return pool.at_work(message.argument)
            return pool.figures.timeline()
        except PipelineStopped:
            return None

    # -- the sender ----------------------------------------------------------------------------

    def _run_sender(self) -> None:
        try:
            pool = self._make_pool()
            pool.start(self._beginning.key, self._beginning.workers)
        except BaseException as error:
            self._tell_fatal("the loading process could not be set up", error)
            return
        with self._pool_lock:
            self._pool = pool
            for message in self._backlog:
                self._obey(pool, message)
            self._backlog.clear()
        try:
            while True:
                try:
                    result = pool.get(None)
                except ChannelClosed:
                    self._obey(pool, self._restarts.get())
                    self._restarted.release()
                    continue
                self._send_result(result)
                del result  # it would keep its slab from being reused while this thread waits
        except (ChannelClosed, PipelineStopped, OSError):
            pass  # the trainer has hung up, or is gone
        except BaseException as error:
            self._tell_fatal("the loading process failed", error)
        finally:
            self._restarted.release()  # the main thread may be waiting for a restart

    def _make_pool(self) -> WorkerPool:
        beginning = self._beginning
        torch.set_default_dtype(beginning.default_dtype)
        for name in os.environ.keys() - beginning.environment.keys():
            del os.environ[name]
        os.environ.update(beginning.environment)
        spec: LoadSpec = beginning.spec.open()
        spec = replace(spec, finalize=partial(pack, slabs=self._slabs))
        return WorkerPool(spec)

    def _send_result(self, result: Result) -> None:
        self._num_sent += 1
        lease = None
        if isinstance(result, Loaded):
            batch: PackedBatch = result.batch
            lease, result = batch.lease, replace(result, batch=batch.as_message())
        details = self._slabs.retired(), self._due_readings()
        try:
            content = pickle.dumps(Answer(self._epoch, pack_errors_of(result), *details), 5)
        except Exception as error:
            result, is_whole = _without_what_cannot_be_sent(result, error)
            lease = lease if is_whole else None
            content = pickle.dumps(Answer(self._epoch, pack_errors_of(result), *details), 5)
        with self._send_lock:
            self._line.send_bytes(content)
            if lease is not None:
                if lease.slab.is_new and lease.slab.descriptor >= 0:
                    reduction.send_handle(self._line, lease.slab.descriptor, os.getppid())
                lease.sent()

    def _due_readings(self) -> bytes | None:
        now = perf_counter_ns()
        is_last = self._num_sent >= self._num_submitted
        if self._pool is None or not (is_last or now - self._readings_ns >= _READINGS_NS):
            return None
        self._readings_ns = now
        return pickle.dumps(self._pool.figures.readings(), 5)

    # -- any thread ----------------------------------------------------------------------------

    def send(self, message: Any) -> None:
        """Send a message, unless the trainer is gone."""
        content = pickle.dumps(message, 5)
        try:
            with self._send_lock:
                self._line.send_bytes(content)
        except OSError:
            pass  # the main thread notices

    def _tell_fatal(self, what: str, error: BaseException) -> None:
        self.send(Fatal(what, pack_error(error)))


def _without_what_cannot_be_sent(result: Result, error: Exception) -> tuple[Result, bool]:
    """Return the result without its iterable's own state, if that is what cannot be pickled, and
    True; else the error in place of the result, and False.
    """
    progress = result.progress
    if progress is not None and progress.state is not None:
        try:
            pickle.dumps(progress.state, 5)
        except Exception as reason:
            progress = replace(progress, state=None, failure=Reason(reason.with_traceback(None)))
            return replace(result, progress=progress), True
    return Failed(result.number, error), False


class _ToTrainer(logging.Handler):
    """Sends the records of our loggers to the trainer, which logs them."""

    def __init__(self, child: Child) -> None:
        super().__init__()
        self._child = child

    def emit(self, record: logging.LogRecord) -> None:
        """Send the record; see ``logging.Handler``."""
        self._child.send(LogLine(record.name, record.levelno, record.getMessage()))
