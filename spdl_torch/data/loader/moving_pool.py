"""A pool that moves its workers from threads to processes when the GIL holds the threads up.

The threads keep working while the children are started. From then on the children get the jobs; the
threads' outstanding batches are handed out first, so the order stays. The loop's rate decides after
a while whether the children keep the work, and the loader remembers that for its next epochs.

An epoch may be too short for that. So the time with threads, and that of the trial, are added up
over epochs, and while the trial is on, epochs begin in children. An iterable dataset, which divides
itself among its workers, moves in that way alone; within an epoch only map-style datasets whose
samples have their own random streams move: any worker can make any of their batches.

While the trial is on, nothing that fails in a child is believed: see ``trial``.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

from ...machine.limits import usable_cores
from ...machine.probes import probe_counters
from ..child_process.signals import handlers_deferred
from ..workers.jobs import Failed, Loaded
from . import move_limits as limits
from .held_up import are_held_up
from .hiring import Hiring
from .moving_stats import MovingStats
from .pace import Pace
from .trial import (
    Given,
    Trial,
    failed_alone,
    is_doubtful,
    is_on_device,
    not_started,
    settle,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ...observe.verdict.placement import Placement
    from ..checkpoint.user_state import WorkerState
    from ..child_process.process_pool import ProcessPool
    from ..rng.keys import StreamKey
    from ..workers.jobs import Result
    from ..workers.moving import Moving
    from ..workers.pool import SinglePool, TunedPool
    from ..workers.transfer_stage import DeviceStage
    from ..workers.worker_pool import WorkerPool


class State(enum.Enum):
    """The state of a pool; ``_FOLLOWING`` says what may follow."""

    THREADS = "the threads work"
    STARTING = "the threads work, and children are being started"
    TRIAL = "the children work, on trial"
    CHILDREN = "the children work"
    STAYED = "the threads work, and there is no further trial"


_FOLLOWING = {
    State.THREADS: (State.STARTING, State.TRIAL, State.STAYED),
    State.STARTING: (State.TRIAL, State.STAYED),
    State.TRIAL: (State.CHILDREN, State.STAYED),
    State.CHILDREN: (),
    State.STAYED: (),
}


@dataclass(slots=True)
class _Segment:
    """Consecutive jobs of one pool."""

    pool: SinglePool
    first: int
    """The number of its first job."""
    end: int | None = None
    """The number of the first job of the next segment; None = it is the last one."""

    @property
    def num_taken(self) -> int:
        """The number of results taken up to this segment's position."""
        return self.first + self.pool.num_taken

    @property
    def is_drained(self) -> bool:
        return self.end is not None and self.num_taken >= self.end


class MovingPool:
    """Threads, and children where they are faster; a ``Pool``.

    The loop's thread owns the state and the segments; see ``Hiring`` for the thread that starts the
    children. ``request_stop`` may run on any thread, in the middle of anything.

    Ctrl-C may end ``get`` at any place, and the loop may call it again. A step of moving takes
    several lines, of which each leaves something that the next ``get`` could not go on from (a
    segment that ends and has no successor, children without an epoch). So signal handlers wait
    while a step is taken: Ctrl-C comes before it or after it.
    """

    def __init__(
        self,
        threads: WorkerPool,
        open_children: Callable[[int], ProcessPool],
        memory: Moving,
        stage: DeviceStage | None = None,
        *,
        within_epochs: bool = True,
    ) -> None:
        """``open_children``: called with the most jobs that may be outstanding. ``stage``: that of
        the threads. ``within_epochs``: whether workers may move while an epoch runs.
        """
        self.threads = threads
        self.hiring = Hiring(lambda: open_children(threads.max_outstanding), memory)
        self.state = State.THREADS
        self.due_seconds = 0.0
        """When to look for the next step, by ``perf_counter()``."""
        self.memory = memory
        self._stage = stage
        self._within_epochs = within_epochs
        self._has_threads = False  # whether the threads have been started
        self._segments: deque[_Segment] = deque()
        self._num_submitted = 0
        self.key: Any = None  # the running epoch's
        self._pace = Pace(memory)
        self._asked: SinglePool = threads  # the pool that the trainer asked last
        self._is_due = False  # a trial, if the next batch is not on a device
        self._trial = Trial()  # of this epoch
        self._beginning: tuple[Sequence[WorkerState], int] = ((), 0)
        self.stats = MovingStats(threads.stats)

    def start(self, key: StreamKey, workers: Sequence[WorkerState] = (), *, first: int = 0) -> None:
        """Start the threads or, on trial, children; see ``Pool.start``."""
        self._beginning = workers, first
        if self.memory.probes_before is None:
            self.memory.probes_before = probe_counters()
        if not self._begin_in_children(key, workers, first):
            self._begin(key, self.threads)
            self._have_threads_begin(key, workers, first)

    def restart(
        self, key: StreamKey, workers: Sequence[WorkerState] = (), *, first: int = 0
    ) -> None:
        """Begin another epoch where the last one ended; see ``Pool.restart``."""
        self._beginning = workers, first
        if self.state is State.TRIAL:
            settle(self.memory)
            if self.memory.is_settled:
                self.go(State.CHILDREN if self.memory.has_moved else State.STAYED)
        pool = self._segments[-1].pool
        if self.state is State.STAYED:
            pool = self.threads
        if self.state in (State.CHILDREN, State.STAYED):  # the idle workers are not needed
            for each in (self.threads, self.hiring.children):
                if each is not None and each is not pool:
                    each.stop()
        if self.state is State.THREADS and self._begin_in_children(key, workers, first):
            return
        self._begin(key, pool)
        if pool is self.threads:
            self._have_threads_begin(key, workers, first)
        else:
            pool.restart(key, workers, first=first)

    def submit(
        self, number: int, index: Any, worker: int, first: int, *, wants_state: bool = False
    ) -> None:
        """Submit a job to the workers that have the work now; see ``Pool.submit``."""
        if self.state is State.TRIAL:
            self._trial.give(number, Given(index, worker, first, wants_state))
        self._segments[-1].pool.submit(number, index, worker, first, wants_state=wants_state)
        self._num_submitted = number + 1

    @property
    def num_taken(self) -> int:
        """The number of results that ``get`` has taken; see ``Pool.num_taken``."""
        return self.current().num_taken

    def get(self, timeout: float | None) -> Result:
        """Return the next result; see ``Pool.get``."""
        if self.state in (State.CHILDREN, State.STAYED):
            return self._turn_to_current().get(timeout)
        now = perf_counter()
        if now >= self.due_seconds:
            self._look(now)
        while True:
            pool = self._turn_to_current()
            try:
                result = pool.get(timeout)
            except RuntimeError:
                loss = None if pool is self.threads else pool.loss
                if loss is None or not self._take_back(self.num_taken, loss):
                    raise
                continue
            if pool is self.threads:
                break
            if self.state is not State.TRIAL or not is_doubtful(result):
                self._trial.believe(result)
                break
            if not self._doubt(result):
                break
        if (error := self._trial.disproved_by(result)) is not None:
            with handlers_deferred():
                self._have_back(error)
        # Children that are being started slow the threads down.
        is_typical = self.state is not State.STARTING
        self._pace.count(on_threads=pool is self.threads, is_typical=is_typical)
        if self._is_due:
            self._begin_trial(result)
        return result

    def _doubt(self, result: Result) -> bool:
        """Have the threads make a batch again, after which the children's go on; return whether
        they can. The workers of an iterable dataset can only begin again all together.
        """
        if not self._within_epochs:
            error = result.error if isinstance(result, Failed) else RuntimeError("no good sample")
            return self._take_back(result.number, error)
        number = result.number
        with handlers_deferred():
            job = self._trial.doubt(result)
            self._have_threads_begin(self.key, (), number)
            self._give_threads(number, job)
            self._segments.appendleft(_Segment(self.threads, number, number + 1))
        return True

    def _give_threads(self, number: int, job: Given) -> None:
        index, worker, first, wants_state = job
        self.threads.submit(number, index, worker, first, wants_state=wants_state)

    def _take_back(self, number: int, error: BaseException) -> bool:
        """Have the threads make all batches from ``number`` on; return whether they can."""
        workers, first = self._beginning
        if not self._within_epochs and number > first:
            self.memory.stays(failed_alone(error))
            return False
        with handlers_deferred():
            self._segments = deque((_Segment(self.threads, number),))
            self._have_threads_begin(self.key, workers if number == first else (), number)
            self._have_back(error, first=number)
        return True

    def _have_back(self, error: BaseException, *, first: int | None = None) -> None:
        """Give the threads, which are at work, the jobs of the children, whose trial is over."""
        self.stats.leave()
        self._segments = deque((_Segment(self.threads, self._segments[0].first),))
        for number, job in self._trial.take_back():
            self._give_threads(number, job)
        self.stats.lead(self.threads.stats)
        self.memory.stays(failed_alone(error))
        self._place_threads()
        self.go(State.STAYED)
        if self.hiring.children is not None:
            self.hiring.children.request_stop()

    def _turn_to_current(self) -> SinglePool:
        """Return the pool from which the next result comes."""
        pool = self.current().pool
        if pool is not self._asked:
            self._asked.stats.leave()
            self._asked = pool
            self._pace.turn()
        return pool

    @property
    def loss(self) -> BaseException | None:
        """The error of those whose batch comes next; see ``Pool.loss``."""
        return self.current().pool.loss

    def at_work(self, awaited: int | None) -> str:
        """Describe what the workers do; see ``Pool.at_work``."""
        return self.current().pool.at_work(awaited)

    @property
    def tuned(self) -> TunedPool | None:
        """The pool that has the work, unless a trial is on, whose outcome tuning would change."""
        if self.state in (State.STARTING, State.TRIAL):
            return None
        return self._segments[-1].pool.tuned

    def rest(self) -> None:
        """Keep the statistics of an epoch that is over; see ``Pool.rest``."""
        self._keep_stats()
        self._segments[-1].pool.rest()

    def _keep_stats(self) -> None:
        if self.state is State.THREADS:
            self.memory.stats = self.threads.stats.snapshot()

    def request_stop(self) -> None:
        """End every wait; see ``Pool.request_stop``."""
        self.threads.request_stop()
        self.hiring.request_stop()

    def stop(self) -> None:
        """Stop the workers; see ``Pool.stop``."""
        self._keep_stats()
        self.hiring.stop()  # first: it keeps what the children recorded, while they live
        self.threads.stop()

    def _begin(self, key: StreamKey, pool: SinglePool, began: float | None = None) -> None:
        """Begin an epoch, now or at ``began``, in which ``pool`` has the work."""
        self._segments = deque((_Segment(pool, 0),))
        self._trial, self._is_due = Trial(), False
        self._asked = pool
        self._num_submitted = 0
        self.key = key
        now = perf_counter()
        self._pace.begin(now if began is None else began)
        left = limits.LOOK_SECONDS - self.memory.unlooked_seconds
        self.due_seconds = now + (left if pool is self.threads else 0.0)
        self.stats.begin(pool.stats)

    def _have_threads_begin(
        self, key: StreamKey, workers: Sequence[WorkerState], first: int
    ) -> None:
        if self._has_threads:
            self.threads.restart(key, workers, first=first)
        else:
            self._has_threads = True
            self.threads.start(key, workers, first=first)

    def _begin_in_children(
        self, key: StreamKey, workers: Sequence[WorkerState], first: int
    ) -> bool:
        """Begin an epoch in new children if they are on trial; return whether it has begun."""
        if not self.memory.is_on_trial:
            return False
        began = perf_counter()
        try:
            children = self.hiring.new()
            self._begin(key, children, began)
            children.start(key, workers, first=first)
        except Exception as error:
            self.hiring.children = None
            self.memory.stays(not_started(error))
            self.go(State.STAYED)
            return False
        self.go(State.TRIAL)
        return True

    def current(self) -> _Segment:
        """Return the segment from which the next result comes."""
        while self._segments[0].is_drained:
            self._segments.popleft()
            self.stats.drained()
        return self._segments[0]

    def go(self, state: State) -> None:
        """Go to ``state``."""
        assert state in _FOLLOWING[self.state], f"{self.state} to {state}"
        self.state = state

    def _look(self, now: float) -> None:
        """Take the step that is due, if its time has come."""
        if self.state is State.THREADS:
            self.due_seconds = now + limits.LOOK_SECONDS
            self.look_at_threads(now)
        elif self.state is State.STARTING:
            self._look_for_children(now)
        elif self._within_epochs:
            self._judge_children()

    def look_at_threads(self, now: float) -> None:
        """Make a trial due if the GIL seems to hold the threads up."""
        memory = self.memory
        tally = memory.threads
        memory.unlooked_seconds = 0.0
        if tally.num_batches + tally.num_epochs < limits.LEAST_BATCHES or not are_held_up(
            self.threads.stats, memory
        ):
            return
        if not self._within_epochs and tally.num_epochs == 1:
            return
        if usable_cores() <= 1:
            memory.stays("there is only one core for each rank")
            self.go(State.STAYED)
        else:
            self._is_due = True

    def _begin_trial(self, result: Result) -> None:
        """Begin a trial of children, unless batches such as this one are on a device."""
        self._is_due, memory = False, self.memory
        if self.state is not State.THREADS or not isinstance(result, Loaded):
            return
        # What a stage has copied is there in any case.
        stage = self._stage
        if is_on_device(result.batch) if stage is None else stage.has_met_device:
            memory.stays("batches are on a device, which a forked process cannot use")
            self.go(State.STAYED)
        elif self._within_epochs:
            with handlers_deferred():
                memory.is_on_trial = True
                self.go(State.STARTING)
                self.due_seconds = 0.0  # look for the children before every batch
                self.hiring.begin(self.key)
        else:
            memory.is_on_trial = True
            self.due_seconds = math.inf

    def _look_for_children(self, now: float) -> None:
        """Hand over to the children if they are ready."""
        children = self.hiring.ready(now, self.key)
        if self.memory.is_settled:  # they will not be
            self.go(State.STAYED)
        elif children is not None:
            with handlers_deferred():
                self.hand_over(children)
                self.go(State.TRIAL)

    def hand_over(self, pool: SinglePool) -> None:
        """Let ``pool`` have the jobs from now on."""
        # Jobs below this number stay with those who have them; their results come first.
        first = self._num_submitted
        self.stats.leave()
        if pool is self.threads:
            self._have_threads_begin(self.key, (), first)
        else:
            pool.restart(self.key, first=first)
        self._segments[-1].end = first
        self._segments.append(_Segment(pool, first))
        self.stats.lead(pool.stats)

    def _judge_children(self) -> None:
        current = self.current()
        if current.pool is self.threads:
            return
        settle(self.memory)
        if not self.memory.is_settled:
            return
        with handlers_deferred():
            if self.memory.has_moved:
                self.go(State.CHILDREN)
                current.pool.stats.place(self._placed(current.pool, self.memory.reason))
            else:
                self.return_to_threads()

    def return_to_threads(self) -> None:
        """Let the threads have the work back, for good."""
        self._place_threads()
        self.hand_over(self.threads)
        self.go(State.STAYED)

    def _place_threads(self) -> None:
        """Report why the threads keep the work."""
        because = f"{self._placed(self.threads).reason}, and {self.memory.reason}"
        self.threads.stats.place(self._placed(self.threads, because))

    @staticmethod
    def _placed(pool: SinglePool, reason: str = "") -> Placement:
        """Return where the workers of ``pool`` live; ``reason``: in place of the one known."""
        placement = pool.stats.placement
        assert placement is not None, "set by whoever opened the pool"
        return replace(placement, reason=reason or placement.reason)
