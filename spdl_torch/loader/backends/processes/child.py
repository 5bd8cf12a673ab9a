"""The worker process, from its first message to its end; and the trainer as it has it: where jobs
and epochs come from, and batches go to.

A worker has its process to itself, as torch's workers have: it is the main thread. It reads its
jobs and sends its batches itself, so that no other thread of the process asks for the GIL.
"""

from __future__ import annotations

import gc
import logging
import os
import pickle
import random
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from ....engine.channel import ChannelClosed
from ....engine.counters import QueueCounters
from ....engine.recorder import SharedRecorder
from ....locks import in_forked_child
from ....machine.probes import count_only_this_thread
from ...checkpoint.epoch import Given
from ...error_notes import Reason
from ...rng.patches import install_functions
from ...stats.counts import WorkerCounts
from ..jobs import Epoch, Failed, Loaded
from ..worker_thread import Worker, use_one_intra_op_thread
from .error_pickle import pack_error, with_errors
from .page import Page, start_guard
from .shared_memory import SlabWriter
from .signals import leave_to_the_trainer
from .wire import Answer, Fatal, Free, LogLine, Restart, Wire, pickle_of

if TYPE_CHECKING:
    from ....engine.counters import TaskCell
    from ..backend import LoadSpec
    from ..jobs import Result
    from .wire import OwnedSocket


class Beginning(NamedTuple):
    """The arguments with which the child is started."""

    page: Page
    spec: Callable[[], LoadSpec]
    """What opens the loader's configuration."""
    number: int
    """The worker's number among those of all processes."""
    default_dtype: torch.dtype
    """torch's default dtype in the trainer."""
    environment: dict[str, str] | None
    """The trainer's environment, and its rank: a fork server's children have the environment from
    when the server started. None = the child is forked, and already has it."""


def main(end: OwnedSocket, asked: OwnedSocket, beginning: Beginning) -> None:
    """Run until the trainer hangs up, or is gone; then multiprocessing ends the process, as it ends
    torch's workers.

    ``asked``: by which the trainer asks what is at work.
    """
    # Collections would write to every page that is shared with the trainer, or with a fork server.
    gc.freeze()
    leave_to_the_trainer()
    signal.set_wakeup_fd(-1)  # a forked child has the trainer's, an event loop's
    wire = Wire(end)
    # What the dataset forks must not hold it open, or the trainer would not see the end.
    in_forked_child(wire.close)
    logger = logging.getLogger("spdl_torch")
    logger.handlers = [_ToTrainer(wire)]  # a forked child has the trainer's handlers
    logger.propagate = False
    beginning.page.is_up = True
    _run_worker(wire, asked, beginning)
    while wire.unsent and not wire.is_over:
        wire.wait()


def _run_worker(wire: Wire, asked: OwnedSocket, beginning: Beginning) -> None:
    """Work until the trainer hangs up, or is gone."""
    what, number = "the worker process could not be set up", beginning.number
    try:
        writer = SlabWriter()
        spec = _opened(beginning)._replace(finalize=writer.pack, memory=writer)
        threading.current_thread().name = f"spdl-worker-{number}"
        _seed_process(spec.base_seed, number)
        activity = start_guard(asked, beginning.page)
        what = "the worker process failed"
        use_one_intra_op_thread()
        count_only_this_thread()
        counts = WorkerCounts(1, spec.recipe.dataset)
        cells = counts.new_cells(enabled=spec.stats)
        trainer = Trainer(wire, beginning.page, writer, counts, tuple(filter(None, cells)))
        worker = Worker(number, spec, activity, cells)
        try:
            with worker.begun():  # where it fails, its error answers its jobs
                while trainer.has_more():
                    with suppress(ChannelClosed):
                        worker.work(trainer.next_epoch())
        finally:
            counts.end()  # its epoch refers to the trainer, and that to it, and so to the dataset
    except BaseException as error:
        wire.say(Fatal(what, pack_error(error)))


def _opened(beginning: Beginning) -> LoadSpec:
    """Return the loader's configuration, and apply the trainer's settings to this process."""
    torch.set_default_dtype(beginning.default_dtype)
    environment = beginning.environment
    if environment is not None:
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
    # Before the dataset is unpickled, and its modules are imported: a function of random that it
    # keeps is found by its name there, and has to be the one that follows the samples' streams.
    install_functions()
    return beginning.spec()


def _seed_process(base_seed: int, worker: int) -> None:
    """Seed the process's own generators as torch seeds its workers'. Samples have streams of their
    own; these are for draws that do not follow them, in threads that the dataset starts."""
    seed = base_seed + worker
    random.seed(seed)
    # With each call for a device that is not in use yet torch keeps a description of where it came
    # from, for which it reads the files of all frames, 3 ms or more: of none meanwhile.
    limit = getattr(sys, "tracebacklimit", None)
    sys.tracebacklimit = 0
    torch.manual_seed(seed)
    sys.tracebacklimit = limit
    np.random.seed([seed & 0xFFFF_FFFF, worker])


# To write what was counted takes as long as a small batch: it is done where no job has come for a
# moment, and otherwise now and then.
_MOMENT_MS = 0.5
_COUNT_NS = 200_000_000


class Trainer:
    """In place of the channels of threads. The worker's thread alone uses it."""

    def __init__(
        self,
        wire: Wire,
        page: Page,
        writer: SlabWriter,
        counts: WorkerCounts,
        cells: tuple[TaskCell, ...],
    ) -> None:
        """``cells``: the worker's, of fetching and of collating; () = epochs are not recorded."""
        self._wire = wire
        self._page = page
        self._writer = writer
        self._counts = counts
        self._cells = cells
        self._waiting: deque[Given | Restart] = deque()  # an epoch that is to begin, or jobs
        self._epoch = self._num_sent = self._num_counted = 0
        self._waited_ns = self._counted_ns = 0

    # What comes:

    def has_more(self) -> bool:
        """Wait for an epoch that begins, or a job; False = the trainer is gone.

        All that has come is read first: an epoch that begins drops the jobs of the one before.
        """
        since_ns = perf_counter_ns()
        self._read()
        while not (self._waiting or self._wire.is_over):
            self._page.idle_since_ns = since_ns
            is_counted = self._num_counted == self._num_sent
            self._wire.wait(None if is_counted else _MOMENT_MS)
            self._read()
            if not (is_counted or self._waiting):
                self._count()
        return bool(self._waiting)

    def next_epoch(self) -> Epoch:
        """Begin the epoch that waits."""
        beginning: Any = self._waiting.popleft()
        self._epoch, key, workers = beginning
        self._num_sent = self._num_counted = self._waited_ns = 0
        self._page.idle_since_ns = 0  # it waited for this epoch, and not in it
        recorder = SharedRecorder(self._page.ring, self._epoch, enabled=bool(self._cells))
        queues: Any = self
        begun = Epoch(
            results=queues,
            outlet=queues,
            in_order=False,  # the trainer puts the results in order
            key=key,
            workers=workers,
            recorder=recorder,
            consumer=recorder.new_consumer_ring(2),
            jobs=(queues,),
        )
        self._counts.begin(begun)
        if self._cells:
            self._page.begin_tasks(self._epoch, self._cells)
        return begun

    def get(self) -> Given:
        """Return the next job. Raises: ChannelClosed: another epoch begins; the trainer is gone."""
        since_ns = perf_counter_ns()
        message = self._waiting[0] if self.has_more() else None
        if not isinstance(message, Given):
            raise ChannelClosed
        self._waiting.popleft()
        now_ns = perf_counter_ns()
        self._waited_ns += now_ns - since_ns
        self._page.idle_since_ns = 0
        return message

    def _read(self) -> None:
        """Read what has come."""
        wire = self._wire
        wire.read()
        while (found := wire.next()) is not None:
            message = pickle.loads(found[0])
            if isinstance(message, Free):
                self._writer.slabs.freed(*message)
            elif isinstance(message, Restart):
                # The jobs of this epoch are dropped, even if they came before.
                self._waiting.clear()
                self._waiting.append(message)
            else:
                *job, slabs, spent = message
                self._writer.slabs.freed(slabs, spent)
                self._waiting.append(Given(*job))
        if wire.is_over:  # nobody wants the batches
            self._waiting.clear()

    def counters(self) -> QueueCounters:
        """Return the time for which the worker had no job."""
        return QueueCounters(get_wait=(self._waited_ns, 0, ()))

    def __len__(self) -> int:
        return len(self._waiting)

    # What is sent:

    def put(self, result: Result) -> None:
        """Send a result, whose batch is packed."""
        writer = self._writer
        self._num_sent += 1
        if self._cells:
            self._page.note_tasks(self._epoch, self._cells)
        retired = writer.slabs.retired()
        try:
            content = pickle_of(self._answer(result, retired))
        except BaseException as error:  # an object's own __reduce__ may raise anything
            result = _without_what_cannot_be_sent(result, error)
            content = pickle_of(self._answer(result, retired))
        self._wire.send(content, *(writer.sent() if isinstance(result, Loaded) else ()))
        # Here, and not before the next job: that may be on its way.
        if perf_counter_ns() - self._counted_ns >= _COUNT_NS:
            self._count()

    def _answer(self, result: Result, retired: tuple[int, ...]) -> Answer:
        return Answer(self._epoch, with_errors(result, pack_error), retired, perf_counter_ns())

    def _count(self) -> None:
        """Write what has been counted: the trainer waits for that where it has all batches."""
        self._counted_ns, self._num_counted = perf_counter_ns(), self._num_sent
        self._page.count(self._epoch, self._num_sent, self._counts.besides_tasks())


def _without_what_cannot_be_sent(result: Result, error: BaseException) -> Result:
    """Return the result without its iterable's own state, if that is what cannot be pickled; else
    the error in place of the result."""
    progress = result.progress
    if progress is not None and progress.state is not None:
        try:
            pickle.dumps(progress.state, 5)
        except BaseException as reason:
            progress = progress._replace(state=None, failure=Reason(reason.with_traceback(None)))
            return result._replace(progress=progress)
    return Failed(result.number, error)


class _ToTrainer(logging.Handler):
    """Sends the records of our loggers to the trainer, which logs them."""

    def __init__(self, wire: Wire) -> None:
        super().__init__()
        self._wire = wire

    def emit(self, record: logging.LogRecord) -> None:
        """Send the record; see ``logging.Handler``."""
        self._wire.say(LogLine(record.name, record.levelno, record.getMessage()))
