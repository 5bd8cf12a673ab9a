"""Moves a crew's workers from threads to processes when the GIL holds the threads up.

The threads keep working while the children are started. From then on the children get the jobs. The
loop's rate decides after a while whether they keep the work, and the loader remembers that for its
next epochs.

An epoch may be too short for that. So the time with threads, and that of the trial, are added up
over epochs, and while the trial is on, epochs begin in children. An iterable dataset, which divides
itself among its workers, moves in that way alone; within an epoch only map-style datasets whose
samples have their own random streams move: any worker can make any of their batches.

While the trial is on, and after one that the threads have won, nothing that fails in a child is
believed: see ``doubts``.
"""

from __future__ import annotations

import enum
import math
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

from ...machine.limits import usable_cores
from ...machine.probes import probe_counters
from ..child_process.signals import handlers_deferred
from ..workers.doubts import Doubtful, Doubts, error_in
from ..workers.jobs import Loaded
from . import trial
from .hiring import Hiring

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ...observe.verdict.placement import Placement
    from ..checkpoint.user_state import WorkerState
    from ..child_process.process_seats import ProcessSeats
    from ..rng.keys import StreamKey
    from ..workers.jobs import Given, Result
    from ..workers.moving import Moving
    from ..workers.seats import Seats
    from ..workers.thread_seats import ThreadSeats
    from ..workers.transfer_stage import DeviceStage
    from .crew import Crew


class State(enum.Enum):
    """The state of a crew's workers; ``FOLLOWING`` says what may follow."""

    THREADS = "the threads work"
    STARTING = "the threads work, and children are being started"
    TRIAL = "the children work, on trial"
    CHILDREN = "the children work"
    STAYED = "the threads work, and there is no further trial"


FOLLOWING = {
    State.THREADS: (State.STARTING, State.TRIAL, State.STAYED),
    State.STARTING: (State.TRIAL, State.STAYED),
    State.TRIAL: (State.CHILDREN, State.STAYED),
    State.CHILDREN: (),
    State.STAYED: (),
}


class Mover:
    """Where the workers of a crew sit, on threads or in children, and when they move.

    The loop's thread owns the state; see ``Hiring`` for the thread that starts the children.
    ``request_stop`` may run on any thread, in the middle of anything.

    Ctrl-C may end the crew's ``get`` at any place, and the loop may call it again. A step of moving
    takes several lines, of which each leaves something that the next ``get`` could not go on from.
    So signal handlers wait while a step is taken: Ctrl-C comes before it or after it.
    """

    def __init__(
        self,
        threads: ThreadSeats,
        open_children: Callable[[Doubts], ProcessSeats],
        memory: Moving,
        stage: DeviceStage | None = None,
        *,
        within_epochs: bool = True,
    ) -> None:
        """``within_epochs``: whether workers may move while an epoch runs."""
        self.threads = threads
        self._doubts = Doubts()
        # Not by a method of this object, which would be a cycle: the dataset goes with its loader.
        self.hiring = Hiring(partial(open_children, self._doubts), memory)
        self.state = State.THREADS
        self.due_seconds = 0.0
        """When to look for the next step, by ``perf_counter()``."""
        self.memory = memory
        self._stage = stage
        self._within_epochs = within_epochs
        self.key: Any = None  # the running epoch's
        self._pace = trial.Pace(memory)
        self.num_threads_left = 0
        """The batches that threads have under way while children get the jobs."""
        self._is_due = False  # a trial, if the next batch is not on a device
        # The jobs of an epoch that began in children, as long as the loop has had no batch of it,
        # and they could begin it again.
        self._replays: list[Given] | None = None

    def prepare(self, key: StreamKey, workers: Sequence[WorkerState]) -> Seats:
        """Have workers there for an epoch that is about to begin, and return where they sit."""
        began, memory = perf_counter(), self.memory
        if memory.probes_before is None:
            memory.probes_before = probe_counters()
        if self.state is State.TRIAL:
            trial.settle(memory)
            if memory.is_settled:
                self.go(State.CHILDREN if memory.has_moved else State.STAYED)
                self._say_why()
        self._pace.begin(began)
        self.key = key
        are_ready = self.state is State.THREADS and memory.is_on_trial and self._hire(key, workers)
        seats = self._leading()
        if self.state in (State.CHILDREN, State.STAYED):  # the idle workers are not needed
            for each in (self.threads, self.hiring.children):
                if each is not None and each is not seats:
                    each.stop()
        if not are_ready:
            seats.prepare(key, workers)
        return seats

    def _leading(self) -> Seats:
        children = self.hiring.children
        if self.state in (State.TRIAL, State.CHILDREN):
            assert children is not None, "guaranteed by the states before"
            return children
        return self.threads

    def _hire(self, key: StreamKey, workers: Sequence[WorkerState]) -> bool:
        """Start children for an epoch that begins in them; return False if there are none."""
        try:
            self.hiring.new().prepare(key, workers)
        except Exception as error:
            self.hiring.children = None
            self.memory.stays(trial.not_started(error))
            self.go(State.STAYED)
            return False
        self.go(State.TRIAL)
        return True

    def has_begun(self) -> None:
        """Note that the epoch has begun."""
        is_trial = self.state is State.TRIAL
        self._doubts.begin(on=is_trial)
        self._replays = [] if is_trial and not self._within_epochs else None
        self._is_due, self.num_threads_left = False, 0
        left = trial.LOOK_SECONDS - self.memory.unlooked_seconds
        self.due_seconds = perf_counter() + (0.0 if is_trial else left)

    def gives(self, job: Given) -> None:
        """Note a job that is given out."""
        if self._replays is not None:
            self._replays.append(job)

    def look(self, crew: Crew) -> None:
        """Take the step that is due, if its time has come."""
        if self.state in (State.CHILDREN, State.STAYED):
            return
        now = perf_counter()
        if now < self.due_seconds:
            return
        if self.state is State.THREADS:
            self.due_seconds = now + trial.LOOK_SECONDS
            self.look_at_threads(crew)
        elif self.state is State.STARTING:
            self._look_for_children(crew, now)
        elif self._within_epochs:
            self._judge_children(crew)

    def tend(self, crew: Crew) -> None:
        """Have the threads make what has failed in a child on trial."""
        while (found := self._doubts.next()) is not None:
            with handlers_deferred():
                self._doubt(crew, found)

    def _doubt(self, crew: Crew, found: Doubtful | BaseException) -> None:
        error = error_in(found.result) if isinstance(found, Doubtful) else found
        if self.state is State.CHILDREN:  # it was found just before that was decided
            _believe(crew, found)
        elif not self._within_epochs:
            self._doubt_all(crew, found, error)
        elif isinstance(found, Doubtful):
            crew.enlist(self.threads)
            self._doubts.have_made_again(found.result)
            self._give_threads([found.job])
        else:
            self._have_back(crew, error)

    def _doubt_all(self, crew: Crew, found: Doubtful | BaseException, error: BaseException) -> None:
        """Have the threads begin the epoch again, or believe the children once the loop has had a
        batch: the workers of an iterable dataset can only begin again all together.
        """
        replays = self._replays
        if replays is not None and not crew.num_taken:
            self._stop_children(error)
            crew.begin_again(self.threads, self._say_why())
            self._give_threads(replays)
            return
        self.memory.stays(trial.failed_alone(error))
        _believe(crew, found)

    def after(self, crew: Crew, result: Result) -> None:
        """Count a result that the loop gets, and learn from it."""
        self._replays = None
        if self.state in (State.CHILDREN, State.STAYED):
            return
        if (error := self._doubts.disproved_by(result)) is not None:
            with handlers_deferred():
                self._have_back(crew, error)
        # Children that are being started slow the threads down.
        is_typical = self.state is not State.STARTING
        is_of_threads = self.state is not State.TRIAL or self.num_threads_left > 0
        self._pace.count(on_threads=is_of_threads, is_typical=is_typical)
        if self.num_threads_left:
            self._leave_to_threads(self.num_threads_left - 1)
        if self._is_due:
            self._begin_trial(result)

    def _leave_to_threads(self, number: int) -> None:
        """Note that so many batches come before those of the children."""
        self.num_threads_left = number
        if not number:
            self._pace.warm_up()

    def _give_threads(self, jobs: Sequence[Given]) -> None:
        for job in jobs:
            self.threads.submit(job)

    def _have_back(self, crew: Crew, error: BaseException) -> None:
        """Give the threads the jobs of the children, whose trial is over."""
        is_first_reason = self.state is State.TRIAL
        crew.enlist(self.threads)
        self._give_threads(self._stop_children(error))
        if is_first_reason:
            crew.hand_over(self.threads, self._say_why())

    def _stop_children(self, error: BaseException) -> list[Given]:
        """End the trial for an error of the children, if it is on; return their jobs."""
        if self.state is State.TRIAL:
            self.memory.stays(trial.failed_alone(error))
            self.go(State.STAYED)
        children = self.hiring.children
        given_up = [] if children is None else children.give_up()
        return sorted([*given_up, *self._doubts.end()])

    @property
    def may_be_tuned(self) -> bool:
        """Whether the number of workers may change: not while a trial is on, whose outcome that
        would change."""
        return self.state not in (State.STARTING, State.TRIAL)

    def ends(self, crew: Crew) -> None:
        """Keep what the next epochs have to know of one that ends."""
        if self.state is State.THREADS:
            self.memory.stats = crew.stats.snapshot_of_workers()

    def request_stop(self) -> None:
        """End the children, and those that are being started. Never blocks; safe in a
        finalizer."""
        self.hiring.request_stop()

    def stop(self) -> None:
        """Stop the children, and wait a moment for their end."""
        self.hiring.stop()

    def go(self, state: State) -> None:
        """Go to ``state``."""
        assert state in FOLLOWING[self.state], f"{self.state} to {state}"
        self.state = state

    def look_at_threads(self, crew: Crew) -> None:
        """Make a trial due if the GIL seems to hold the threads up."""
        memory = self.memory
        tally = memory.threads
        memory.unlooked_seconds = 0.0
        if tally.num_batches + tally.num_epochs < trial.LEAST_BATCHES:
            return
        from .held_up import are_held_up  # judges: no first batch waits for its import

        if not are_held_up(crew.stats, memory):
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
        if trial.is_on_device(result.batch) if stage is None else stage.has_met_device:
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

    def _look_for_children(self, crew: Crew, now: float) -> None:
        """Hand over to the children if they are ready."""
        children = self.hiring.ready(now, self.key)
        if self.memory.is_settled:  # they will not be
            self.go(State.STAYED)
        elif children is not None:
            with handlers_deferred():
                self.hand_over(crew, children)

    def hand_over(self, crew: Crew, children: ProcessSeats) -> None:
        """Let the children have the jobs from now on, on trial."""
        children.prepare(self.key, ())
        self._doubts.begin(on=True)
        self._leave_to_threads(crew.num_outstanding)
        crew.hand_over(children, children.placement)
        self.go(State.TRIAL)

    def _judge_children(self, crew: Crew) -> None:
        if self.num_threads_left:
            return
        trial.settle(self.memory)
        if not self.memory.is_settled:
            return
        with handlers_deferred():
            if self.memory.has_moved:
                self.go(State.CHILDREN)
                self._doubts.believe()
                crew.stats.note_placement(self._say_why())
            else:
                self.return_to_threads(crew)

    def return_to_threads(self, crew: Crew) -> None:
        """Let the threads have the work back, for good. What fails in a child that still has jobs
        is theirs, too."""
        self.go(State.STAYED)
        crew.hand_over(self.threads, self._say_why())

    def _say_why(self) -> Placement:
        """Return where the workers sit from now on, with the outcome of the trial as the reason."""
        seats, reason = self._leading(), self.memory.reason
        assert seats.placement is not None, "set by whoever opened the seats"
        if seats is self.threads:
            reason = f"{seats.placement.reason}, and {reason}"
        seats.placement = replace(seats.placement, reason=reason)
        return seats.placement


def _believe(crew: Crew, found: Doubtful | BaseException) -> None:
    """Let the loop have what failed in a child."""
    if isinstance(found, Doubtful):
        crew.deliver(found.result)
    else:
        crew.end_epoch()
