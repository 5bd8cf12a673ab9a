"""A worker that has a process to itself, as torch's workers have: it is the main thread.

It reads its jobs from the connection itself and writes its batches to it, so that no other thread
of the process asks for the GIL. Only questions (what is at work? what did the threads do?) are
answered by a second thread, which otherwise sleeps.
"""

from __future__ import annotations

import os
import pickle
import select
import threading
from collections import deque
from time import perf_counter_ns, sleep
from typing import TYPE_CHECKING, Any

from ...errors import PipelineStopped
from ...machine.probes import count_only_this_thread
from ...pipeline.channel.waits import ChannelClosed
from ...pipeline.recorder.flight_recorder import FlightRecorder
from ...pipeline.stats.counters import QueueCounters
from ..workers.activity import Activity, describe_activities
from ..workers.counts import WorkerCounts
from ..workers.epoch import Epoch, Shift
from ..workers.jobs import Job
from ..workers.worker_info import use_one_intra_op_thread
from ..workers.worker_thread import Worker
from .messages import Free, Restart, Submit
from .questions import answer

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.connection import Connection

    from ..checkpoint.user_state import WorkerState
    from ..rng.keys import StreamKey
    from ..workers.jobs import Result
    from ..workers.load_spec import LoadSpec
    from .uplink import Uplink

_FINISH_SECONDS = 5.0  # for the sample that is being fetched when the trainer is gone


class LoneWorker:
    """The one worker of this process."""

    def __init__(
        self,
        number: int,
        spec: LoadSpec,
        key: StreamKey,
        workers: Sequence[WorkerState],
        uplink: Uplink,
    ) -> None:
        self._number = number
        self._spec = spec
        self._uplink = uplink
        # Written by the worker, on the main thread; read by the thread that answers questions.
        self._activity = Activity()
        self.counts = uplink.counts = WorkerCounts(1, spec.recipe.dataset)
        self._recorder: FlightRecorder | None = None
        self._begin = key, tuple(workers)

    def run(self, connection: Connection) -> None:
        """Work until the trainer hangs up, or is gone. Runs on the main thread."""
        use_one_intra_op_thread()
        count_only_this_thread()
        wire = _Wire(connection, self._uplink, self._new_shift)
        wire.restart(*self._begin)
        worker = Worker(
            self._number,
            self._spec,
            wire.shifts,
            self._activity,
            copying=None,
            cells=self.counts.new_cells(enabled=self._spec.stats),
            could_not_start=_note_nothing,
            note_shared=_note_nothing,
        )
        try:
            worker.serve(_note_nothing, lambda: False)
        except OSError:
            pass  # the trainer is gone

    def let_go(self) -> None:
        """Keep nothing of the user's: the thread that answers questions keeps this object."""
        del self._spec, self._begin, self.counts
        self._uplink.counts = None
        self._activity = Activity()

    def answer(self, control: Connection) -> None:
        """Answer questions until the trainer is gone; then end the process, if need be by force.

        Runs on a thread of its own.
        """
        while True:
            try:
                number, question, argument = pickle.loads(control.recv_bytes())
                answer(control, number, self._reply(question, argument))
            except (EOFError, OSError):
                break
        # The main thread finds the connection closed as well, and ends the process after its
        # sample. If that does not return, the process ends here.
        sleep(_FINISH_SECONDS)
        os._exit(0)

    def _reply(self, question: str, argument: Any) -> Any:
        try:
            is_idle = self._activity.job is None and not self._activity.beginning
            if question == "at_work" and is_idle:
                return "None of its threads is at work."  # it waits for a job, in our own code
            if question == "at_work":
                thread = threading.main_thread()
                return describe_activities([self._activity], [thread], argument)
            return None if self._recorder is None else self._recorder.stages_copied()
        except PipelineStopped:
            return None

    def _new_shift(self, wire: _Wire, key: StreamKey, workers: Sequence[WorkerState]) -> Shift:
        spec = self._spec
        recorder = FlightRecorder("DataLoader", spec.pipeline_number, enabled=spec.stats)
        queues: Any = wire
        epoch = Epoch(
            results=queues,
            outlet=queues,
            in_order=False,  # the trainer puts the results in order
            key=key,
            workers=tuple(workers),
            recorder=recorder,
            consumer=recorder.new_consumer_ring(2),
        )
        shift = Shift(epoch, (queues,), None)
        self.counts.begin(shift)
        self._recorder = recorder
        return shift


class _Shifts:
    """The queue of epochs as the worker sees it: it holds one at a time."""

    def __init__(self) -> None:
        self.closed = False
        self.next: Shift | None = None

    def get(self) -> Shift:
        """Return the latest epoch. Raises: ChannelClosed."""
        shift, self.next = self.next, None
        if shift is None:
            self.closed = True
            raise ChannelClosed
        return shift


class _Wire:
    """The connection as a worker sees it: a queue of jobs, and one of results. Only the main thread
    uses it, so it needs no lock."""

    def __init__(self, connection: Connection, uplink: Uplink, new_shift: Any) -> None:
        self.shifts: Any = _Shifts()
        self._connection = connection
        self._uplink = uplink
        self._new_shift = new_shift
        self._waiting: deque[Any] = deque()  # messages read before their turn
        self._waited_ns = 0
        self._poll = getattr(select, "poll", None) and select.poll()
        if self._poll is not None:
            self._poll.register(connection.fileno(), select.POLLIN)

    def get(self) -> Job:
        """Return the next job. Raises: ChannelClosed: another epoch begins, or the trainer is gone.

        Messages that have come meanwhile are read first: an epoch that begins drops the jobs of
        the one before.
        """
        since_ns = perf_counter_ns()
        while True:
            while not self._waiting or self._has_more():
                self._read()
            message = self._waiting.popleft()
            if message is None:
                raise ChannelClosed
            if isinstance(message, Restart):
                self._uplink.begin(message.epoch)
                self.restart(message.key, message.workers)
                raise ChannelClosed
            self._waited_ns += perf_counter_ns() - since_ns
            number, index, first, wants_state = message
            return Job(number, index, first, shared=False, wants_state=wants_state)

    def restart(self, key: StreamKey, workers: Sequence[WorkerState]) -> None:
        """Begin an epoch: the worker takes it from ``shifts``."""
        self._waited_ns = 0
        self.shifts.next = self._new_shift(self, key, workers)

    def put(self, result: Result) -> None:
        """Send a result. Raises: OSError: the trainer is gone."""
        self._uplink.send_result(result)

    def counters(self) -> QueueCounters:
        """Return the time for which the worker had no job."""
        return QueueCounters(get_wait=(self._waited_ns, 0, ()))

    def close(self) -> None:
        """Do nothing: the connection ends with the process."""

    def __len__(self) -> int:
        return len(self._waiting)

    def _has_more(self) -> bool:
        if self._waiting and self._waiting[-1] is None:
            return False
        return bool(self._poll.poll(0)) if self._poll is not None else self._connection.poll(0)

    def _read(self) -> None:
        try:
            message = pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            self._waiting.append(None)
            return
        if isinstance(message, Free):
            self._uplink.free(message)
        elif isinstance(message, Restart):
            # The jobs of this epoch are dropped, even if they came before.
            self._waiting.clear()
            self._waiting.append(message)
        else:
            *job, slabs, spent = message
            self._uplink.job_came(Free(slabs, spent))
            self._waiting.append(Submit(*job))


def _note_nothing(*_: object) -> None:
    """Do nothing: nobody waits for the worker, whose error answers its jobs."""
