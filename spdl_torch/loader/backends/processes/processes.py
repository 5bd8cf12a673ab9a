"""Workers in processes of their own.

Each child is one worker. A job goes to the one that has the fewest, or to the one whose turn it is;
each sends batches as they are done, and whoever waits for a batch reads them: the loop's thread or,
where batches are pinned or go to a device, a thread that passes them on. If a child is killed, a
new one takes its place, and its batches are made again: by the new one, or by the others if it
would have to import everything first. Children may join and leave while an epoch runs: one that
leaves gets no more jobs, and ends when it has answered those that it has.
"""

from __future__ import annotations

import atexit
import logging
from collections import Counter
from collections.abc import Callable, Sequence, Sized
from functools import partial
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from ....engine.channel import Channel
from ....engine.failures import attach_note
from ....handlers import handlers_deferred
from ....locks import LiveObjects
from ...error_notes import describe_batch
from ...rng.patches import install_for_copies
from ..jobs import Failed
from ..transfer_stage import most_regions
from ..workers import JOIN_SECONDS, Workers
from .hearing import Hearing, Incoming, Unpacking
from .process import FINISH_SECONDS, context_of, forks, reap
from .process_counts import ProcessCounts
from .worker_process import WorkerProcess

if TYPE_CHECKING:
    from ....engine.recorder import FlightRecorder
    from ....engine.rings import ConsumerRing
    from ....observe.verdict.placement import Placement
    from ...checkpoint.epoch import Given
    from ...checkpoint.user_state import WorkerState
    from ...rng.keys import StreamKey
    from ..backend import LoadSpec
    from ..jobs import Epoch, Loaded, Result
    from ..transfer_stage import DeviceStage

_logger = logging.getLogger("spdl_torch.data")

_MOST_REPLACED = 100
"""The number of children that are replaced in an epoch."""
_MOST_DEATHS = 2
"""The number of processes that may be killed while the same batch was next."""
_LOOK_SECONDS = 0.1
"""The interval at which a loop looks after the children while another thread hears them."""


class Processes(Workers):
    """Worker processes; see ``Workers``.

    ``request_stop`` asks the children to end. Each has 5 s to finish the sample that it is
    fetching; then it ends itself. Only the interpreter's exit waits for that.

    The loop's thread owns all of this; the stage's thread, if there is one, hears the children.
    """

    def __init__(
        self,
        spec: LoadSpec,
        stage: DeviceStage | None,
        placement: Placement,
        unpacking: Unpacking,
        context: Any = None,
    ) -> None:
        """``unpacking``: what is known of earlier epochs. ``context``: see ``context_of``."""
        super().__init__(spec._replace(finalize=None, device_index=None), stage, placement)
        self.forwards = stage is not None or spec.finalize is not None
        # One bound for the slabs of all. They are locked only for a device stage, which knows when
        # the GPU has copied. Otherwise pin_memory() has to find pageable memory: it then copies
        # into pinned memory of its own, which torch does not reuse too early.
        limit = spec.max_outstanding, spec.num_workers
        self._locker = None if stage is None else stage.limited(*limit)
        self._context = context_of(context)
        self.hearing = Hearing(spec.finalize, unpacking)
        self.counts: ProcessCounts = ProcessCounts(spec.num_workers, self.hearing)
        self._numbers = range(spec.num_workers)  # of the workers that do not leave
        # Those that get no jobs while others can make them: those that replace killed ones, until
        # they are up, which takes seconds.
        self._spared: tuple[WorkerProcess, ...] = ()
        self._next = 0  # of the child whose turn it is among equals
        self._has_turns = spec.has_turns
        self._deaths = Counter[int]()  # in this epoch, by the number of the batch that was next
        _live.add(self)

    def begin(
        self, key: StreamKey, workers: Sequence[WorkerState], order: object = None
    ) -> tuple[ConsumerRing, Sized]:
        """Begin an epoch; see ``Workers``. From here on a thread unpacks the batches if that took
        the loop long in the last one: it would not do it while it waits for its device."""
        self.forwards = self.forwards or self.hearing.unpacking.is_long
        if self.forwards:
            self.look_seconds, self.hearing.is_the_loops = _LOOK_SECONDS, False
        return super().begin(key, workers, order)

    def _prepare(self, epoch: Epoch) -> None:
        """Start the children, or have those that are there begin an epoch; new ones come in place
        of those that died.
        """
        reap()
        if self.hearing.children:
            self.counts.keep_rows()
            self._hear()
            self._epoch = self.failure = None
            self._deaths.clear()
        elif forks(self._context):
            install_for_copies()
        there, leaving = self.hearing.children, self._leaving()
        stay = {n: there[n] for n in self._numbers if n in there and not there[n].is_over}
        missing = [number for number in self._numbers if number not in stay]
        new = {n: self._new_child(n, epoch) for n in missing}
        if new:
            self._start(*new.values())
        for child in stay.values():
            child.restart(epoch)
        gone = [there[number] for number in missing if number in there]
        self.hearing.children, self._spared = {**stay, **new}, ()
        for child in gone:
            child.reap()
            _logger.warning("%s It had no batch to make; a new one takes its place.", child.death())
        for child in (*leaving, *gone):
            child.hang_up()

    # They are forked on the loop's thread, as torch forks its workers: the child's main thread is
    # then a copy of the caller's, with the thread-local and context variables that the dataset
    # finds there (the precision of decimals, numpy's error handling, torch's grad mode). Signal
    # handlers run after that. A fork server may take seconds to start, so a thread waits for it,
    # and Ctrl-C need not.

    def _new_child(self, number: int, epoch: Epoch, *, num_lives: int = 1) -> WorkerProcess:
        """Return a child that is yet to be started."""
        spec, context, locker = self._spec, self._context, self._locker
        return WorkerProcess(number, spec, context, epoch, locker=locker, num_lives=num_lives)

    def _start(self, *children: WorkerProcess) -> None:
        """Start children, and return when they exist. Raises: why one could not be started; all of
        them then end."""
        try:
            if forks(self._context):
                _start_each(children)
            else:
                # Not an Event: Ctrl-C in its wait may leave its own lock held.
                started = Channel[None](1)
                self._start_late(children, partial(started.put, None))
                started.get()
            for child in children:
                if isinstance(child.fault, BaseException):
                    raise child.fault
        except BaseException:  # Ctrl-C too
            for child in children:
                child.hang_up()
                child.fault = None  # break the cycle: its traceback holds this frame
            raise

    def _start_late(self, children: Sequence[WorkerProcess], then: Callable[[], object]) -> None:
        """Start children on a thread of its own, which calls ``then`` in the end; those that could
        not be started say so."""

        def run() -> None:
            _start_each(children)
            then()

        self._threads.spawn("starter", run)

    def _hear(self) -> None:
        """Read what the children have sent, the last log lines among it."""
        if self.hearing.is_the_loops:
            self.hearing.read(0)

    def _new_results(self, recorder: FlightRecorder) -> Any:
        return Incoming(self.hearing, recorder, in_order=self._spec.in_order)

    def _begin(self, epoch: Epoch) -> None:
        incoming: Any = epoch.results
        self.counts.begin(epoch)
        self.hearing.results = incoming.heard  # after the children were told: see there

    def give(self, job: Given) -> Exception | None:
        """Give out a job; see ``Backend``. Return what pickle raises on its index. One that finds
        the workers gone is lost: so is the epoch, as ``take`` says."""
        hearing = self.hearing
        if self._epoch is None:
            return None
        if not hearing.is_read:
            self._hear()  # to know who has the fewest jobs
        hearing.is_read = False
        self._look_after()
        if len(self.hearing.children) > len(self._numbers):
            self._part()
        numbers = self.numbers_at_work() if self._spared else self._numbers
        if self._has_turns:
            child = hearing.children[numbers[job.worker % len(numbers)]]
        else:
            child = self._idlest(numbers)
        error = child.submit(job)
        if error is not None:
            hearing.results.append((None, Failed(job.number, error), perf_counter_ns()))
            hearing.wake()
        return error

    def hand_over(self, result: Loaded) -> Result:
        """Return a result as the loop gets it; see ``Backend``."""
        if self.forwards:
            return super().hand_over(result)
        incoming: Any = self._running().results
        return incoming.opened()  # type: ignore[no-any-return]  # Incoming's

    def _idlest(self, numbers: Sequence[int]) -> WorkerProcess:
        """Return the child with the fewest jobs; of equals, whose turn it is.

        Where the loop is slower than the children, none has a job left. If the first one always
        got the next job, it would need shared memory for all the batches that wait.
        """
        count, children = len(numbers), self.hearing.children
        best = self._next % count
        child = children[numbers[best]]
        for step in range(1, count):  # by hand: min() with a key takes 5 µs
            at = (self._next + step) % count
            other = children[numbers[at]]
            if len(other.jobs) < len(child.jobs):
                child, best = other, at
        self._next = best + 1
        return child

    def numbers_at_work(self) -> Sequence[int]:
        """Return the numbers of the children that are not spared; all if every one is."""
        self._spared = tuple(child for child in self._spared if not child.page.is_up)
        children = self.hearing.children
        return [n for n in self._numbers if children[n] not in self._spared] or self._numbers

    def _tend(self, epoch: Epoch) -> None:
        """Replace the children that have ended, and give a worker its slabs back."""
        self._look_after()
        for child in () if self.hearing.is_the_loops else self.hearing.children.values():
            child.wire.flush()
        if len(self.hearing.children) == 1 and not len(epoch.outlet):
            # The worker may need the freed slabs for the very batch that the loop waits for. (Of
            # several children each gets its own back with its next job, which is soon.)
            for child in self.hearing.children.values():
                if any(freed := child.mappings.freed()):
                    child.send(freed)

    def _look_after(self) -> None:
        """Replace the children that have ended, and hear those that were started late."""
        news = self.hearing.news
        while news and not self.is_stopped:
            child = news.popleft()
            if child.is_over:
                self._child_has_ended(child)
            else:
                self.hearing.children = {**self.hearing.children}  # its end is to be heard, too

    def at_work(self, awaited: int | None) -> str:
        """Describe what the children's threads do. Blocks up to 2 s for a child's answer."""
        self._hear()
        children = [] if self._epoch is None else list(self.hearing.children.values())
        asked = [child for child in children if awaited in child.jobs] or children
        described = [child.at_work() for child in asked]
        if self.forwards or not described:
            described.append(super().at_work(awaited))  # this process's thread
        return "\n".join(filter(None, described))

    def rest(self) -> None:
        """Note that an epoch is over; see ``Backend``."""
        for child in self.hearing.children.values():
            child.send(child.mappings.freed())  # so that it wakes, and writes what it has counted
        super().rest()
        self._hear()
        self._part()

    def _end(self) -> None:
        """Let the children end, and keep what they did."""
        try:
            self.counts.keep_rows()
        finally:  # Ctrl-C too
            for child in self.hearing.children.values():
                child.hang_up()

    def stop(self) -> None:
        """Call ``request_stop``, and wait for the children, which have nothing left to do."""
        if self._epoch is not None:
            self._hear()
        super().stop()
        reap(JOIN_SECONDS)
        for child in self.hearing.children.values():
            child.mappings.close()
            child.close()

    def resize(self, num_workers: int, max_outstanding: int) -> int:
        """Change the number of children; see ``Backend``.

        Waits until the processes of those that join exist, some milliseconds each. If one cannot be
        started, this is logged, and the number no longer changes.
        """
        epoch = self._running()
        if not self._is_whole or num_workers < 1 or max_outstanding < 1:
            return len(self._numbers)
        self._spec = self._spec._replace(max_outstanding=max_outstanding)
        for number in range(len(self._numbers), num_workers):
            if not self._join(number, epoch):
                num_workers = number
                break
        if self._locker is not None:
            self._locker.grow(most_regions(max_outstanding, num_workers))
        self._numbers = range(num_workers)
        self._spec = self._spec._replace(num_workers=num_workers)
        self.counts.workers.change(num_workers)
        return num_workers

    def _join(self, number: int, epoch: Epoch) -> bool:
        """Give that number to a child, perhaps to the one that is about to leave it."""
        if number in self.hearing.children:  # it has not left yet
            return True
        child = self._new_child(number, epoch)
        try:
            self._start(child)
        except Exception as error:
            self._stay("process", error)
            return False
        self._put(child)  # not before: the epoch ends with one that cannot be started
        return True

    def _put(self, child: WorkerProcess) -> None:
        """Have a new child heard; end it if ``request_stop``, on another thread, could not."""
        self.hearing.children = {**self.hearing.children, child.number: child}
        self.hearing.wake()
        if self.is_stopped:
            child.hang_up()

    def _leaving(self) -> list[WorkerProcess]:
        """Return the children that get no more jobs."""
        return [child for n, child in self.hearing.children.items() if n not in self._numbers]

    def _part(self) -> None:
        """End the children that are to leave and have answered all their jobs."""
        idle = [child for child in self._leaving() if not child.jobs]
        if idle:
            left = {n: child for n, child in self.hearing.children.items() if child not in idle}
            self.hearing.children = left
        for child in idle:
            self.counts.left(child)
            child.hang_up()

    def _child_has_ended(self, child: WorkerProcess) -> None:
        """Have the child's batches made again, or end the epoch.

        A forked successor is there in milliseconds, and makes them. One that imports torch takes
        seconds, in which the loop would wait for the first of them: the others make them.
        """
        epoch = self._epoch
        if epoch is None or self.hearing.children.get(child.number) is not child:
            return
        child.reap()
        jobs = list(child.jobs.values())
        are_copies = forks(self._context)
        tries_again = child.may_try_again and not are_copies
        if not (tries_again or self._may_be_replaced(child, jobs)):
            self._lose(epoch, child, jobs)
            return
        lives = child.num_lives + 1 if tries_again else 1
        successor = self._new_child(child.number, epoch, num_lives=lives)
        numbers: Sequence[int] = (successor.number,)
        if are_copies:
            _start_each([successor])
            if successor.fault is not None:
                self._lose(epoch, successor)
                return
        self._put(successor)
        if not (are_copies or tries_again):  # the loop would wait for its import
            self._spared = (*self._spared, successor)
            numbers = self.numbers_at_work()
        for job in jobs:
            # Another child gets them after its own jobs: if one kills it, too, that one is first
            # again, and its second death is counted.
            self._idlest(numbers).submit(job)
        if not are_copies:
            self._start_late([successor], partial(self.hearing.tell, successor))
        if tries_again:
            return
        self.counts.replaced(child)  # before the log says so: whoever reads it finds it reported
        others_make = successor.number not in numbers
        who = "The others" if others_make else "A new process"
        ending = "" if others_make else "s"
        what = f"take{ending} its place; it had no batch to make."
        if jobs:
            what = f"make{ending} its batches again: {', '.join(str(job.number) for job in jobs)}."
        _logger.warning("%s %s %s", child.death(), who, what)

    def _may_be_replaced(self, child: WorkerProcess, jobs: list[Given]) -> bool:
        """Return whether another child can make the jobs of one that has ended.

        It can if batches do not depend on those before: workers that take turns have iterators or
        random streams that ended with them. A child that is the only one is not replaced: nobody
        else is at work, and it holds all the batches, any of which may have ended it.
        """
        if not child.was_killed or self._has_turns or len(self.hearing.children) == 1:
            return False
        if jobs:
            self._deaths[jobs[0].number] += 1
            if self._deaths[jobs[0].number] >= _MOST_DEATHS:
                return False
        return self.counts.num_replaced < _MOST_REPLACED

    def _lose(self, epoch: Epoch, child: WorkerProcess, jobs: Sequence[Given] = ()) -> None:
        """End the epoch with the end of a process that had these jobs."""
        death = child.death()
        if jobs and child.page.is_up:  # it may have been at work on the first
            number, index = jobs[0].number, jobs[0].index
            is_iterables = isinstance(index, list) and None in index  # it has no indices
            batch = f"batch {number}" if is_iterables else describe_batch(number, index)
            attach_note(death, f"its next batch was {batch}")
        self.failure = death
        epoch.close()


def _start_each(children: Sequence[WorkerProcess]) -> None:
    """Start them, up to one that cannot be: it says why."""
    with handlers_deferred():
        try:
            for child in children:
                child.start()
        except BaseException as error:
            child.fault, child.is_over = error, True


_live: LiveObjects[Processes] = LiveObjects()


def _stop_at_exit() -> None:
    """End all processes, which have time for the samples that they make; after that
    multiprocessing kills them."""
    for each in _live.now():
        each.request_stop()
    reap(FINISH_SECONDS)


atexit.register(_stop_at_exit)  # after multiprocessing's own function: it is called before that
