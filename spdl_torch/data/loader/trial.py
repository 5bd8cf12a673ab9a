"""The trial of worker processes: whom to believe while it is on, and how it ends.

A dataset may do what a child cannot: use CUDA, of which a forked process has none, or a handle that
does not survive the fork. So on trial nothing that fails in a child is believed: the threads make
that batch again. If it fails there as well, the child was right, and the trial goes on; if not, the
threads take back all that the children have yet to make, and keep the work. A dataset whose batches
are on a device is not tried at all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...io._transfer.tree import leaves_of, spots_of
from ...named_tuples import NamedTuple
from ..child_process.signals import handlers_deferred
from ..workers.jobs import Failed, NoBatch
from . import move_limits as limits

if TYPE_CHECKING:
    from ..workers.jobs import Result
    from ..workers.moving import Moving


class Given(NamedTuple):
    """A job, as it was given to ``Pool.submit``."""

    index: Any
    worker: int
    first: int
    wants_state: bool


class Trial:
    """The jobs of one epoch that children on trial have or had last, and the result of theirs that
    the threads are to confirm."""

    def __init__(self) -> None:
        self._jobs: dict[int, Given] = {}
        self._doubted: Result | None = None

    def give(self, number: int, job: Given) -> None:
        """Note a job of the children."""
        self._jobs[number] = job

    def believe(self, result: Result) -> None:
        """Note that the loop gets a result of the children."""
        self._jobs.pop(result.number, None)

    def doubt(self, result: Result) -> Given:
        """Doubt a result of the children; return its job, for the threads."""
        self._doubted = result
        return self._jobs[result.number]

    def disproved_by(self, result: Result) -> BaseException | None:
        """Return the error in the doubted result if this, of the threads, is another outcome of
        that job; None = it confirms it, or nothing is doubted there."""
        doubted = self._doubted
        if doubted is None or doubted.number != result.number:
            return None
        self._doubted = None
        self._jobs.pop(result.number, None)
        return None if _outcome(result) == _outcome(doubted) else _error_in(doubted)

    def take_back(self) -> list[tuple[int, Given]]:
        """Return the children's jobs, in order: nothing of theirs is awaited any more."""
        jobs, self._jobs, self._doubted = sorted(self._jobs.items()), {}, None
        return jobs


def is_doubtful(result: Result) -> bool:
    """Return whether a child may have failed where a thread does not."""
    is_bad = result.tries is not None and bool(result.tries.bad)
    return is_bad or isinstance(result, Failed | NoBatch)


def is_on_device(batch: Any) -> bool:
    """Return whether a part of the batch is, as a forked process could not have it."""
    for leaf in leaves_of(spots_of(batch)):
        device = getattr(leaf, "device", None)
        if getattr(leaf, "is_cuda", False) or getattr(device, "type", "cpu") not in ("cpu", "meta"):
            return True
    return False


def settle(memory: Moving) -> None:
    """Decide where the workers live from now on, if the trial is on and was long enough."""
    tally = memory.children
    if not memory.is_on_trial or tally.num_batches + tally.num_epochs < limits.TRIAL_BATCHES:
        return
    least = limits.TRIAL_SECONDS
    if tally.num_epochs and tally.num_epochs < limits.TRIAL_EPOCHS:
        least = limits.LONG_TRIAL_SECONDS
    if tally.seconds + tally.num_epochs * min(tally.start_seconds, least) < least:
        return
    gain = memory.gain
    with handlers_deferred():  # Ctrl-C comes before a decision or after it
        if gain >= limits.GAIN:
            memory.moved(gain)
        else:
            memory.stays(f"the loop was {gain:.2f} times as fast with processes")


def failed_alone(error: BaseException) -> str:
    """Return the reason to stay on threads after an error that they do not have."""
    return f"a batch failed in a worker process alone ({type(error).__name__}: {error})"


def not_started(error: BaseException) -> str:
    """Return the reason to stay on threads if there are no children."""
    return f"worker processes could not be started ({error})"


def _outcome(result: Result) -> Any:
    """Return what two attempts at a batch have in common if both fail for the same reason."""
    bad = () if result.tries is None else result.tries.bad
    failed = type(result.error) if isinstance(result, Failed) else None
    return type(result), failed, [(each.key, type(each.error)) for each in bad]


def _error_in(result: Result) -> BaseException:
    """Return the error of a batch that failed, or of one of its samples."""
    if isinstance(result, Failed):
        return result.error
    assert result.tries is not None, "without it nothing may fail but the batch"
    return result.tries.bad[0].error
