"""Which worker process gets which job, and what it means for an epoch that one was killed in it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from ...engine.failures import attach_note
from ..error_notes import describe_batch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ..workers.jobs import Given
    from .connection import ChildConnection
    from .worker_process import WorkerProcess


class Roster:
    """The processes of a crew by the number of the worker, and the jobs that each has.

    The loop's thread gives jobs out, and a receiver's takes them from a process that has ended:
    both hold ``lock`` meanwhile.
    """

    def __init__(self, num_workers: int, *, has_turns: bool) -> None:
        """``has_turns``: each job belongs to one worker; else to the one with the fewest."""
        # Re-entrant: Ctrl-C's handler may iterate, too.
        self.lock = threading.RLock()
        self.children: dict[int, WorkerProcess] = {}
        """The processes by number. Replaced and never changed, so that any thread may go through
        it."""
        self.numbers = range(num_workers)
        """The numbers of those that do not leave. The loop's thread writes it."""
        self._has_turns = has_turns
        # Those that get no jobs while others can make them: those that replace killed ones, until
        # they are up, which takes seconds. Replaced and never changed, like children, and only
        # while the lock is held.
        self._spared: tuple[WorkerProcess, ...] = ()
        self._next = 0  # of the process whose turn it is among equals

    def put(self, child: WorkerProcess) -> None:
        """Let a process be the worker of its number."""
        with self.lock:
            self.children = {**self.children, child.number: child}

    def submit(self, job: Given) -> Exception | None:
        """Send a job to the worker whose turn it is, or to the idlest one. Return what pickle
        raises; None = it is sent."""
        with self.lock:
            numbers = self.numbers_at_work() if self._spared else self.numbers
            if self._has_turns:
                child = self.children[numbers[job.worker % len(numbers)]]
            else:
                child = self._idlest(numbers)
            return child.submit(job)

    def replace(
        self, child: WorkerProcess, successor: WorkerProcess, jobs: Iterable[Given], *, late: bool
    ) -> bool:
        """Put a successor in the place of a process that has ended, and give out its jobs anew;
        return whether others make them. ``late``: the successor takes seconds to start, in which
        the loop would wait for the first of them, so others make them if there are any.
        """
        with self.lock:
            self.put(successor)
            numbers: Sequence[int] = (child.number,)
            if late:
                self._spared = (*self._spared, successor)
                numbers = self.numbers_at_work()
            for job in jobs:
                # A successor gets them once it is up. Another process gets them after its own jobs:
                # if one kills it, too, that one is first again, and its second death is counted.
                self._idlest(numbers).submit(job)
        return child.number not in numbers

    def begin_epoch(self, children: dict[int, WorkerProcess]) -> None:
        """Go on with these, all workers, in another epoch."""
        with self.lock:
            self.children = children
            self._spared = ()

    @property
    def leaving(self) -> list[WorkerProcess]:
        """The processes that get no more jobs."""
        return [child for n, child in self.children.items() if n not in self.numbers]

    def part(self) -> list[WorkerProcess]:
        """Strike off those that leave and have answered all their jobs; return them."""
        with self.lock:
            idle = [child for child in self.leaving if not child.jobs]
            self.children = {p: c for p, c in self.children.items() if c not in idle}
        return idle

    def with_batch(self, number: int | None) -> list[WorkerProcess]:
        """Return the process that has the batch; all of them if any batch would do."""
        children = list(self.children.values())
        return [child for child in children if number in child.jobs] or children

    def _idlest(self, numbers: Sequence[int]) -> WorkerProcess:
        """Return the process with the fewest jobs; of equals, whose turn it is. The lock is held.

        Where the loop is slower than the processes, none has a job left. If the first one always
        got the next job, it would need shared memory for all the batches that wait.
        """
        count, children = len(numbers), self.children
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
        """Return the numbers of the processes that are not spared; all if every one is. The lock is
        held: a receiver's thread calls this, too.
        """
        self._spared = tuple(child for child in self._spared if not child.connection.is_up)
        children = self.children
        return [n for n in self.numbers if children[n] not in self._spared] or self.numbers


_MOST_DEATHS = 2
"""The number of processes that may be killed while the same batch was next."""


class Losses:
    """The losses of one epoch. Those of a process's end are counted on its receiver's thread, while
    the roster's lock is held; the one that ends the epoch is set before the epoch is closed, and
    read by the loop after that has woken it.
    """

    def __init__(self) -> None:
        self._deaths: dict[int, int] = {}  # by the number of the batch that was next
        self._fatal: ChildConnection | None = None
        self._fatal_job = ""

    def may_be_replaced(self, jobs: Sequence[Given]) -> bool:
        """Count a process that was killed with these jobs, and return whether another one should
        try them.
        """
        if not jobs:
            return True
        deaths = self._deaths[jobs[0].number] = self._deaths.get(jobs[0].number, 0) + 1
        return deaths < _MOST_DEATHS

    def end(self, connection: ChildConnection, jobs: Sequence[Given] = ()) -> None:
        """Note the process whose end ends the epoch, and the jobs that it had."""
        if jobs and connection.is_up:  # it may have been at work on the first
            number, index = jobs[0].number, jobs[0].index
            is_iterables = isinstance(index, list) and None in index  # it has no indices
            self._fatal_job = f"batch {number}" if is_iterables else describe_batch(number, index)
        self._fatal = connection

    @property
    def error(self) -> BaseException | None:
        """A new error that says why the epoch has ended; None = it has not, for all that is known
        here.
        """
        if self._fatal is None:
            return None
        death = self._fatal.death()
        if self._fatal_job:
            attach_note(death, f"its next batch was {self._fatal_job}")
        return death
