"""The child's way to the trainer: results, answers, log lines."""

from __future__ import annotations

import logging
import os
import pickle
import threading
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from ...error_notes import Reason
from ..jobs import Failed, Loaded
from .error_pickle import pack_error, pack_errors_of
from .messages import Answer, Fatal, Free, LogLine, content_of
from .wire import File

if TYPE_CHECKING:
    from ...stats.counts import WorkerCounts
    from ..jobs import Result
    from .batch_packing import PackedBatch
    from .page import Page
    from .shared_memory import Lease, SlabPool
    from .wire import Wire

_READINGS_NS = 100_000_000  # the least time between readings; the last batch always has one


class Uplink:
    """Sends to the trainer. Any thread may use it; the worker's alone takes jobs and sends
    results."""

    def __init__(self, wire: Wire, slabs: SlabPool, page: Page) -> None:
        self.slabs = slabs
        self.page = page
        self.epoch = 0
        """The epoch of the results that are sent."""
        self.counts: WorkerCounts | None = None
        self._wire = wire
        # Held while writing. Re-entrant: sending may log, and log lines are sent too.
        self._lock = threading.RLock()
        self._num_submitted = self._num_sent = 0
        self._readings_ns = 0

    def begin(self, epoch: int) -> None:
        """Send results of another epoch from now on."""
        self.epoch, self._num_submitted, self._num_sent = epoch, 0, 0

    def job_came(self, freed: Free) -> None:
        """Note that a job was received, and which slabs it sets free."""
        self._num_submitted += 1
        self.free(freed)

    def free(self, freed: Free) -> None:
        """Take back the slabs that the trainer no longer views."""
        for slab in freed.slabs:
            self.slabs.give_back(slab)
        for slab in freed.spent:
            self.slabs.drop(slab)

    def wait(self) -> None:
        """Wait until something comes; what did not fit before is sent as soon as it does."""
        self._wire.wait()
        if self._wire.has_unsent:
            with self._lock:
                self._wire.flush()

    def send(self, message: Any) -> None:
        """Send a message. Never waits: what does not fit is sent later."""
        self._say(pickle.dumps(message, 5))

    def _say(self, content: bytes, *files: File) -> None:
        with self._lock:
            self._wire.send(content, *files)

    def send_fatal(self, what: str, error: BaseException) -> None:
        """Send the reason why the child cannot go on."""
        self.send(Fatal(what, pack_error(error)))

    def send_result(self, result: Result) -> None:
        """Send a result whose batch is packed."""
        self._num_sent += 1
        lease: Lease | None = None
        if isinstance(result, Loaded):
            batch: PackedBatch = result.batch
            lease, result = batch.lease, result._replace(batch=batch.as_message())
        retired = self.slabs.retired()
        self._note_readings()  # before: who has the batch finds it counted
        files: tuple[File, ...] = ()
        if lease is not None and lease.slab.is_new:
            files = (File(os.dup(lease.slab.descriptor)),)
        try:
            content = content_of(self._answer(result, retired))
        except BaseException as error:  # an object's own __reduce__ may raise anything
            result, is_whole = _without_what_cannot_be_sent(result, error)
            lease, files = (lease, files) if is_whole else (None, ())
            content = content_of(self._answer(result, retired))
        self._say(content, *files)
        if lease is not None:
            lease.sent()

    def _answer(self, result: Result, retired: tuple[int, ...]) -> Answer:
        return Answer(self.epoch, pack_errors_of(result), retired, perf_counter_ns())

    def send_all(self) -> None:
        """Wait until all was sent, or the trainer is gone."""
        while self._wire.has_unsent and not self._wire.is_over:
            self.wait()

    def forget(self) -> None:
        """Close the wire in a process that the dataset forked: it must not hold it open, or the
        trainer would not see this one's end.
        """
        self._wire.close()

    def carry_log_lines(self) -> None:
        """Send what our loggers log to the trainer, which logs it."""
        logger = logging.getLogger("spdl_torch")
        logger.handlers = [_ToTrainer(self)]  # a forked child has the trainer's handlers
        logger.propagate = False

    def _note_readings(self) -> None:
        now = perf_counter_ns()
        is_last = self._num_sent >= self._num_submitted
        if self.counts is None or not (is_last or now - self._readings_ns >= _READINGS_NS):
            return
        self._readings_ns = now
        self.page.count(self.epoch, pickle.dumps(self.counts.readings(), 5))


def _without_what_cannot_be_sent(result: Result, error: BaseException) -> tuple[Result, bool]:
    """Return the result without its iterable's own state, if that is what cannot be pickled, and
    True; else the error in place of the result, and False.
    """
    progress = result.progress
    if progress is not None and progress.state is not None:
        try:
            pickle.dumps(progress.state, 5)
        except BaseException as reason:
            progress = progress._replace(state=None, failure=Reason(reason.with_traceback(None)))
            return result._replace(progress=progress), True
    return Failed(result.number, error), False


class _ToTrainer(logging.Handler):
    """Sends the records of our loggers to the trainer, which logs them."""

    def __init__(self, uplink: Uplink) -> None:
        super().__init__()
        self._uplink = uplink

    def emit(self, record: logging.LogRecord) -> None:
        """Send the record; see ``logging.Handler``."""
        self._uplink.send(LogLine(record.name, record.levelno, record.getMessage()))
