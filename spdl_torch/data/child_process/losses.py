"""The worker processes that were killed in an epoch, and what that means for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...engine.failures import attach_note
from ..error_notes import describe_batch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..workers.jobs import Given
    from .connection import ChildConnection

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
