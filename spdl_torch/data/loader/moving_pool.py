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
import logging
import math
import threading
from collections import deque
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

from ...machine.limits import usable_cores
from ...machine.probes import probe_counters
from ...machine.starting import start
from ...pipeline.threads.thread_group import taking_over
from ..child_process.signals import handlers_deferred
from ..workers.jobs import Failed, Loaded
from . import move_limits as limits
from .held_up import are_held_up
from .moving_stats import MovingStats
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
    from ..workers.worker_pool import WorkerPool

_logger = logging.getLogger("spdl_torch.data")


class _State(enum.Enum):
    """The state of a pool; ``_MOVES`` says what may follow."""

    THREADS = "the threads work"
    STARTING = "the threads work, and children are being started"
    TRIAL = "the children work, on trial"
    CHILDREN = "the children work"
    STAYED = "the threads work, and there is no further trial"


_MOVES = {
    _State.THREADS: (_State.STARTING, _State.TRIAL, _State.STAYED),
    _State.STARTING: (_State.TRIAL, _State.STAYED),
    _State.TRIAL: (_State.CHILDREN, _State.STAYED),
    _State.CHILDREN: (),
    _State.STAYED: (),
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

    The loop's thread owns the state and the segments. One other thread, the mover, starts the
    children; it writes ``_children`` and ``_are_open``, and the memory only if it fails. The loop's
    thread writes these three only while no mover runs: before it starts one, and once ``_are_open``
    is set, which is the last thing that a mover does. ``request_stop`` may run on any thread, in
    the middle of anything; it writes ``_is_stopped`` alone.

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
        *,
        within_epochs: bool = True,
    ) -> None:
        """``open_children``: called with the most jobs that may be outstanding.
        ``within_epochs``: whether workers may move while an epoch runs.
        """
        self._threads = threads
        self._open_children = open_children
        self._memory = memory
        self._within_epochs = within_epochs
        self._has_threads = False  # whether the threads have been started
        self._children: ProcessPool | None = None
        self._are_open = False  # set by the thread that starts the children, once they are there
        self._opened_seconds = math.inf  # when the loop first saw that
        self._is_second_start = False  # whether the loop's thread has forked the children
        self._is_stopped = False
        self._state = _State.THREADS
        self._segments: deque[_Segment] = deque()
        self._num_submitted = 0
        self._key: Any = None  # the running epoch's
        self._due_seconds = 0.0
        self._last_seconds = 0.0  # when the epoch began, or the loop had its last batch
        self._num_warm = 0  # the next batches that are not counted: those of a beginning
        self._is_first = False  # whether the epoch's first batch is still to come
        self._asked: SinglePool = threads  # the pool that the trainer asked last
        self._is_due = False  # a trial, if the next batch is not on a device
        self._trial = Trial()  # of this epoch
        self._beginning: tuple[Sequence[WorkerState], int] = ((), 0)
        self.stats = MovingStats(threads.stats)

    def start(self, key: StreamKey, workers: Sequence[WorkerState] = (), *, first: int = 0) -> None:
        """Start the threads or, on trial, children; see ``Pool.start``."""
        self._beginning = workers, first
        if self._memory.probes_before is None:
            self._memory.probes_before = probe_counters()
        if not self._begin_in_children(key, workers, first):
            self._begin(key, self._threads)
            self._have_threads_begin(key, workers, first)

    def restart(
        self, key: StreamKey, workers: Sequence[WorkerState] = (), *, first: int = 0
    ) -> None:
        """Begin another epoch where the last one ended; see ``Pool.restart``."""
        self._beginning = workers, first
        if self._state is _State.TRIAL:
            settle(self._memory)
            if self._memory.is_settled:
                self._go(_State.CHILDREN if self._memory.has_moved else _State.STAYED)
        pool = self._segments[-1].pool
        if self._state is _State.STAYED:
            pool = self._threads
        if self._state in (_State.CHILDREN, _State.STAYED):  # the idle workers are not needed
            for each in (self._threads, self._children):
                if each is not None and each is not pool:
                    each.stop()
        if self._state is _State.THREADS and self._begin_in_children(key, workers, first):
            return
        self._begin(key, pool)
        if pool is self._threads:
            self._have_threads_begin(key, workers, first)
        else:
            pool.restart(key, workers, first=first)

    def submit(
        self, number: int, index: Any, worker: int, first: int, *, wants_state: bool = False
    ) -> None:
        """Submit a job to the workers that have the work now; see ``Pool.submit``."""
        if self._state is _State.TRIAL:
            self._trial.give(number, Given(index, worker, first, wants_state))
        self._segments[-1].pool.submit(number, index, worker, first, wants_state=wants_state)
        self._num_submitted = number + 1

    @property
    def num_taken(self) -> int:
        """The number of results that ``get`` has taken; see ``Pool.num_taken``."""
        return self._current().num_taken

    def get(self, timeout: float | None) -> Result:
        """Return the next result; see ``Pool.get``."""
        if self._state in (_State.CHILDREN, _State.STAYED):
            return self._turn_to_current().get(timeout)
        now = perf_counter()
        if now >= self._due_seconds:
            self._look(now)
        while True:
            pool = self._turn_to_current()
            try:
                result = pool.get(timeout)
            except RuntimeError:
                if pool is not self._children or self._children.loss is None:
                    raise
                if not self._take_back(self.num_taken, self._children.loss):
                    raise
                continue
            if pool is not self._children:
                break
            if self._state is not _State.TRIAL or not is_doubtful(result):
                self._trial.believe(result)
                break
            if not self._doubt(result):
                break
        if (error := self._trial.disproved_by(result)) is not None:
            with handlers_deferred():
                self._have_back(error)
        self._count(pool)
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
            self._have_threads_begin(self._key, (), number)
            self._give_threads(number, job)
            self._segments.appendleft(_Segment(self._threads, number, number + 1))
        return True

    def _give_threads(self, number: int, job: Given) -> None:
        index, worker, first, wants_state = job
        self._threads.submit(number, index, worker, first, wants_state=wants_state)

    def _take_back(self, number: int, error: BaseException) -> bool:
        """Have the threads make all batches from ``number`` on; return whether they can."""
        workers, first = self._beginning
        if not self._within_epochs and number > first:
            self._memory.stays(failed_alone(error))
            return False
        with handlers_deferred():
            self._segments = deque((_Segment(self._threads, number),))
            self._have_threads_begin(self._key, workers if number == first else (), number)
            self._have_back(error, first=number)
        return True

    def _have_back(self, error: BaseException, *, first: int | None = None) -> None:
        """Give the threads, which are at work, the jobs of the children, whose trial is over."""
        self.stats.leave()
        self._segments = deque((_Segment(self._threads, self._segments[0].first),))
        for number, job in self._trial.take_back():
            self._give_threads(number, job)
        self.stats.lead(self._threads.stats)
        self._memory.stays(failed_alone(error))
        self._place_threads()
        self._go(_State.STAYED)
        if self._children is not None:
            self._children.request_stop()

    def _turn_to_current(self) -> SinglePool:
        """Return the pool from which the next result comes."""
        pool = self._current().pool
        if pool is not self._asked:
            self._asked.stats.leave()
            self._asked = pool
            self._num_warm = limits.TRIAL_BATCHES  # those of the children's start
        return pool

    def _count(self, pool: SinglePool) -> None:
        """Count the batch that the loop gets now, and the time since the last one."""
        now, memory = perf_counter(), self._memory
        seconds, self._last_seconds = now - self._last_seconds, now
        memory.count()
        if pool is self._threads:
            memory.unlooked_seconds += seconds
        if self._num_warm:
            self._num_warm -= 1
            return
        if self._state is _State.STARTING:
            return  # children that are being started slow the threads down
        tally = memory.threads if pool is self._threads else memory.children
        if self._is_first:
            self._is_first = False
            tally.begin(seconds)
        else:
            tally.add(seconds)

    @property
    def loss(self) -> BaseException | None:
        """The error of those whose batch comes next; see ``Pool.loss``."""
        return self._current().pool.loss

    def at_work(self, awaited: int | None) -> str:
        """Describe what the workers do; see ``Pool.at_work``."""
        return self._current().pool.at_work(awaited)

    @property
    def tuned(self) -> TunedPool | None:
        """The pool that has the work, unless a trial is on, whose outcome tuning would change."""
        if self._state in (_State.STARTING, _State.TRIAL):
            return None
        return self._segments[-1].pool.tuned

    def rest(self) -> None:
        """Keep the statistics of an epoch that is over; see ``Pool.rest``."""
        self._keep_stats()
        self._segments[-1].pool.rest()

    def _keep_stats(self) -> None:
        if self._state is _State.THREADS:
            self._memory.stats = self._threads.stats.snapshot()

    def request_stop(self) -> None:
        """End every wait; see ``Pool.request_stop``."""
        self._is_stopped = True  # before looking for children: _open looks after it has some
        self._threads.request_stop()
        children = self._children
        if children is not None:
            children.request_stop()

    def stop(self) -> None:
        """Stop the workers; see ``Pool.stop``."""
        self._keep_stats()
        self._is_stopped = True
        children = self._children
        if children is not None:
            children.stop()  # first: it keeps what they recorded, while they live
        self.request_stop()
        self._threads.stop()

    def _begin(self, key: StreamKey, pool: SinglePool) -> None:
        self._segments = deque((_Segment(pool, 0),))
        self._trial, self._is_due = Trial(), False
        self._asked = pool
        self._num_submitted = 0
        self._key = key
        self._last_seconds = perf_counter()
        self._num_warm, self._is_first = 0, True
        left = limits.LOOK_SECONDS - self._memory.unlooked_seconds
        self._due_seconds = self._last_seconds + (0.0 if pool is self._children else left)
        self._memory.begin_epoch()
        self.stats.begin(pool.stats)

    def _have_threads_begin(
        self, key: StreamKey, workers: Sequence[WorkerState], first: int
    ) -> None:
        if self._has_threads:
            self._threads.restart(key, workers, first=first)
        else:
            self._has_threads = True
            self._threads.start(key, workers, first=first)

    def _begin_in_children(
        self, key: StreamKey, workers: Sequence[WorkerState], first: int
    ) -> bool:
        """Begin an epoch in new children if they are on trial; return whether it has begun."""
        if not self._memory.is_on_trial:
            return False
        began = perf_counter()
        try:
            children = self._children = self._open_children(self._threads.max_outstanding)
            self._begin(key, children)
            self._last_seconds = began
            children.start(key, workers, first=first)
        except Exception as error:
            self._children = None
            self._memory.stays(not_started(error))
            self._go(_State.STAYED)
            return False
        self._go(_State.TRIAL)
        return True

    def _current(self) -> _Segment:
        """Return the segment from which the next result comes."""
        while self._segments[0].is_drained:
            self._segments.popleft()
            self.stats.drained()
        return self._segments[0]

    def _go(self, state: _State) -> None:
        assert state in _MOVES[self._state], f"{self._state} to {state}"
        self._state = state

    def _look(self, now: float) -> None:
        """Take the step that is due, if its time has come."""
        if self._state is _State.THREADS:
            self._due_seconds = now + limits.LOOK_SECONDS
            self._look_at_threads(now)
        elif self._state is _State.STARTING:
            self._look_for_children(now)
        elif self._within_epochs:
            self._judge_children()

    def _look_at_threads(self, now: float) -> None:
        memory = self._memory
        tally = memory.threads
        memory.unlooked_seconds = 0.0
        if tally.num_batches + tally.num_epochs < limits.LEAST_BATCHES or not are_held_up(
            self._threads.stats, memory
        ):
            return
        if not self._within_epochs and tally.num_epochs == 1:
            return
        if usable_cores() <= 1:
            memory.stays("there is only one core for each rank")
            self._go(_State.STAYED)
        else:
            self._is_due = True

    def _begin_trial(self, result: Result) -> None:
        """Begin a trial of children, unless batches such as this one are on a device."""
        self._is_due, memory = False, self._memory
        if self._state is not _State.THREADS or not isinstance(result, Loaded):
            return
        if is_on_device(result.batch):
            memory.stays("batches are on a device, which a forked process cannot use")
            self._go(_State.STAYED)
        elif self._within_epochs:
            with handlers_deferred():
                memory.is_on_trial = True
                self._go(_State.STARTING)
                self._due_seconds = 0.0  # look for the children before every batch
                run = taking_over(self._open)
                start(threading.Thread(target=run, name="spdl-mover", daemon=True))
        else:
            memory.is_on_trial = True
            self._due_seconds = math.inf

    def _open(self) -> None:
        """Start children, at first on a separate thread: the loop goes on meanwhile."""
        try:
            children = self._open_children(self._threads.max_outstanding)
            self._children = children
            if not self._is_stopped:
                children.start(self._key)
        except Exception as error:  # not Ctrl-C, where this is the loop's thread
            if not self._is_stopped:  # the end of the loop says nothing about later epochs
                self._memory.stays(not_started(error))
        else:
            # Last of all: once the loop sees it, the children get jobs.
            self._are_open = True
        finally:
            # request_stop() sets the flag before it looks for children, and this looks for the flag
            # after they are there: so one of the two stops them, whoever comes first. Once they are
            # open, the loop's thread may put others in their place: so read the attribute once.
            opened = self._children
            if self._is_stopped and opened is not None:
                opened.request_stop()

    def _look_for_children(self, now: float) -> None:
        """Hand over to the children if they are ready."""
        if self._memory.is_settled:  # by the mover, which failed
            self._go(_State.STAYED)
            return
        children = self._children
        if not self._are_open or children is None:
            return
        self._opened_seconds = min(self._opened_seconds, now)
        # Not before they are ready. A fork beside the program's threads may wait for ever in a
        # library that does not expect a fork; the threads then keep the work.
        if children.is_up:
            with handlers_deferred():
                self._hand_over(children)
                self._go(_State.TRIAL)
        elif (loss := children.loss) is not None:
            self._memory.stays(not_started(loss))
            self._go(_State.STAYED)
        elif children.are_copies and now - self._opened_seconds >= limits.LONGEST_START_SECONDS:
            with handlers_deferred():
                self._start_again(children)

    def _start_again(self, children: ProcessPool) -> None:
        """Fork children on the loop's thread, which takes as long as when torch's loader does it,
        and is safe wherever that is: they keep what belongs to the thread.
        """
        children.stop()  # at once: they have done nothing yet, and are killed
        self._children, self._are_open, self._opened_seconds = None, False, math.inf
        if self._is_second_start:
            self._memory.stays("worker processes that were forked never began")
            self._go(_State.STAYED)
            return
        self._is_second_start = True
        _logger.info(
            "DataLoader: worker processes that were forked beside the training loop did not begin "
            "within %g s; the loop forks others.",
            limits.LONGEST_START_SECONDS,
        )
        self._open()

    def _hand_over(self, pool: SinglePool) -> None:
        """Let ``pool`` have the jobs from now on."""
        # Jobs below this number stay with those who have them; their results come first.
        first = self._num_submitted
        self.stats.leave()
        if pool is self._threads:
            self._have_threads_begin(self._key, (), first)
        else:
            pool.restart(self._key, first=first)
        self._segments[-1].end = first
        self._segments.append(_Segment(pool, first))
        self.stats.lead(pool.stats)

    def _judge_children(self) -> None:
        current = self._current()
        if current.pool is not self._children:
            return
        settle(self._memory)
        if not self._memory.is_settled:
            return
        with handlers_deferred():
            if self._memory.has_moved:
                self._go(_State.CHILDREN)
                current.pool.stats.place(self._placed(current.pool, self._memory.reason))
            else:
                self._return()

    def _return(self) -> None:
        """Let the threads have the work back, for good."""
        self._place_threads()
        self._hand_over(self._threads)
        self._go(_State.STAYED)

    def _place_threads(self) -> None:
        """Report why the threads keep the work."""
        because = f"{self._placed(self._threads).reason}, and {self._memory.reason}"
        self._threads.stats.place(self._placed(self._threads, because))

    @staticmethod
    def _placed(pool: SinglePool, reason: str = "") -> Placement:
        """Return where the workers of ``pool`` live; ``reason``: in place of the one known."""
        placement = pool.stats.placement
        assert placement is not None, "set by whoever opened the pool"
        return replace(placement, reason=reason or placement.reason)
