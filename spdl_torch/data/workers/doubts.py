"""What fails in worker processes on trial, which is not believed.

A dataset may do what a process cannot: use CUDA, of which a forked one has none, or a handle that
does not survive the fork. So the threads make such a batch again. If it fails there as well, the
process was right, and the trial goes on; if not, the threads have the work back, for good.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Any

from ...named_tuples import NamedTuple
from .jobs import Failed, NoBatch

if TYPE_CHECKING:
    from .jobs import Given, Result


class Doubtful(NamedTuple):
    """A result of a process that failed."""

    job: Given
    result: Result


class Doubts:
    """The doubts of one epoch. Receivers' threads find what is doubtful; the loop's thread does the
    rest."""

    def __init__(self) -> None:
        self._are_on = False
        # Held to look whether they are on and to find something, and to end them: afterwards
        # nothing comes any more.
        self._lock = threading.Lock()
        self._found: deque[Doubtful | BaseException] = deque()
        self._doubted: dict[int, Result] = {}  # by number; the threads make them again

    def begin(self, *, on: bool) -> None:
        """Begin an epoch. ``on``: with processes on trial."""
        with self._lock:
            self._are_on = on
            self._found.clear()
            self._doubted.clear()

    def believe(self) -> None:
        """Believe from now on what comes from processes."""
        with self._lock:
            self._are_on = False

    def take(self, job: Given, result: Result) -> bool:
        """Take a result out of the batches' way, if it is doubtful; return whether it was."""
        return _is_doubtful(result) and self._find(Doubtful(job, result))

    def take_loss(self, loss: BaseException | None) -> bool:
        """Take the error for which no batch comes from the processes any more; return whether it
        was doubtful."""
        return loss is not None and self._find(loss)

    def _find(self, found: Doubtful | BaseException) -> bool:
        with self._lock:
            if self._are_on:
                self._found.append(found)
            return self._are_on

    def next(self) -> Doubtful | BaseException | None:
        """Return what was found next; None = nothing else was found."""
        return self._found.popleft() if self._found else None

    def have_made_again(self, result: Result) -> None:
        """Note that the threads are to confirm a result."""
        self._doubted[result.number] = result

    def disproved_by(self, result: Result) -> BaseException | None:
        """Return the error in the doubted result if this, of the threads, is another outcome of
        that job; None = it confirms it, or nothing is doubted there."""
        doubted = self._doubted.pop(result.number, None) if self._doubted else None
        if doubted is None or _outcome(result) == _outcome(doubted):
            return None
        return error_in(doubted)

    def end(self) -> list[Given]:
        """Doubt nothing any more; return the jobs of what was found and not made again."""
        self.believe()
        self._doubted.clear()
        jobs = [found.job for found in self._found if isinstance(found, Doubtful)]
        self._found.clear()
        return jobs


def error_in(result: Result) -> BaseException:
    """Return the error of a batch that failed, or of one of its samples."""
    if isinstance(result, Failed):
        return result.error
    assert result.tries is not None, "without it nothing may fail but the batch"
    return result.tries.bad[0].error


def _is_doubtful(result: Result) -> bool:
    is_bad = result.tries is not None and bool(result.tries.bad)
    return is_bad or isinstance(result, Failed | NoBatch)


def _outcome(result: Result) -> Any:
    """Return what two attempts at a batch have in common if both fail for the same reason."""
    bad = () if result.tries is None else result.tries.bad
    failed = type(result.error) if isinstance(result, Failed) else None
    return type(result), failed, [(each.key, type(each.error)) for each in bad]
