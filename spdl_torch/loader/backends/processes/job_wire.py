"""The wire to the trainer as a worker sees it: queues of epochs, of jobs and of results.

A worker has its process to itself, as torch's workers have: it is the main thread. It reads its
jobs and sends its batches itself, so that no other thread of the process asks for the GIL.
"""

from __future__ import annotations

import pickle
from collections import deque
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from ....engine.channel import ChannelClosed
from ....engine.counters import QueueCounters
from ....engine.recorder import SharedRecorder
from ..epoch import Epoch, Shift
from ..jobs import Given, Job
from .messages import Free, Restart

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...checkpoint.user_state import WorkerState
    from ...rng.keys import StreamKey
    from ...stats.counts import WorkerCounts
    from ..jobs import Result
    from .uplink import Uplink
    from .wire import Wire


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


class JobWire:
    """The wire in place of the channels of threads. Only the main thread uses it, so it needs no
    lock.

    counts: counts each epoch. records: whether it is recorded.
    """

    def __init__(
        self,
        wire: Wire,
        uplink: Uplink,
        counts: WorkerCounts,
        *,
        records: bool,
    ) -> None:
        self.shifts: Any = _Shifts()
        self._wire = wire
        self._uplink = uplink
        self._counts = counts
        self._records = records
        self._waiting: deque[Any] = deque()  # messages read before their turn
        self._waited_ns = 0

    def get(self) -> Job:
        """Return the next job. Raises: ChannelClosed: another epoch begins, or the trainer is gone.

        Messages that have come meanwhile are read first: an epoch that begins drops the jobs of
        the one before.
        """
        since_ns = perf_counter_ns()
        while True:
            self._read(since_ns)
            message = self._waiting.popleft()
            if message is None:
                raise ChannelClosed
            if isinstance(message, Restart):
                self._uplink.begin(message.epoch)
                self.restart(message.key, message.workers)
                raise ChannelClosed
            self._waited_ns += perf_counter_ns() - since_ns
            self._uplink.page.idle_since_ns = 0
            number, index, first, wants_state, _ = message
            return Job(number, index, first, shared=False, wants_state=wants_state)

    def restart(self, key: StreamKey, workers: Sequence[WorkerState]) -> None:
        """Begin an epoch: the worker takes it from ``shifts``."""
        self._waited_ns = 0
        queues: Any = self
        page, number = self._uplink.page, self._uplink.epoch
        recorder = SharedRecorder(page.ring, number, enabled=self._records)
        epoch = Epoch(
            results=queues,
            outlet=queues,
            in_order=False,  # the trainer puts the results in order
            key=key,
            workers=tuple(workers),
            recorder=recorder,
            consumer=recorder.new_consumer_ring(2),
        )
        self.shifts.next = shift = Shift(epoch, (queues,), None)
        self._counts.begin(shift)

    def put(self, result: Result) -> None:
        """Send a result."""
        self._uplink.send_result(result)

    def counters(self) -> QueueCounters:
        """Return the time for which the worker had no job."""
        return QueueCounters(get_wait=(self._waited_ns, 0, ()))

    def close(self) -> None:
        """Do nothing: the wire ends with the process."""

    def __len__(self) -> int:
        return len(self._waiting)

    def _read(self, since_ns: int) -> None:
        """Read what has come; wait until there is a message that the worker has to see."""
        wire, waiting = self._wire, self._waiting
        wire.read()
        while True:
            while (found := wire.next()) is not None:
                self._take(pickle.loads(found[0]))
            if wire.is_over:  # nobody wants the batches
                waiting.clear()
                waiting.append(None)
            if waiting:
                return
            self._uplink.page.idle_since_ns = since_ns
            self._uplink.wait()

    def _take(self, message: Any) -> None:
        if isinstance(message, Free):
            self._uplink.free(message)
        elif isinstance(message, Restart):
            # The jobs of this epoch are dropped, even if they came before.
            self._waiting.clear()
            self._waiting.append(message)
        else:
            *job, slabs, spent = message
            self._uplink.job_came(Free(slabs, spent))
            self._waiting.append(Given(*job))
