"""The messages between the trainer's thread and the workers: jobs out, results back."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..checkpoint.resume_state import WorkerState
    from ..fetching.bad_samples import BadSample, Tries

__all__ = ["Exhausted", "Failed", "Job", "Loaded", "NoBatch", "Result"]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A finished batch."""

    number: int
    batch: Any
    progress: WorkerState | None = None
    """The state of the worker's iterable after this batch; None = map-style."""
    tries: Tries | None = None
    """The samples that were tried; None = no sample may fail."""


@dataclass(frozen=True, slots=True)
class NoBatch:
    """A batch without any good sample."""

    number: int
    tries: Tries
    progress: WorkerState | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """The user's own exception, in place of a batch."""

    number: int
    error: BaseException
    progress: WorkerState | None = None
    tries: Tries | None = None


@dataclass(frozen=True, slots=True)
class Exhausted:
    """The end of this worker's iterable."""

    number: int
    progress: WorkerState | None = None
    tries: Tries | None = None


Result = Loaded | Failed | Exhausted | NoBatch


class Job:
    """One batch to make; if several workers share it, also which samples are taken and done."""

    __slots__ = (
        *("_done", "_next", "bad", "errors", "first", "first_error", "index", "number", "samples"),
        *("shared", "size", "wants_state"),
    )

    def __init__(
        self, number: int, index: Any, first: int, *, shared: bool, wants_state: bool = False
    ) -> None:
        self.number = number
        self.first = first  # the position of its first sample in the epoch
        self.index = index
        self.shared = shared
        self.wants_state = wants_state  # ask the worker's iterable for its state afterwards
        self.size = len(index) if isinstance(index, list | tuple) else 1
        self.samples: list[Any] = [None] * len(index) if shared else []
        self.errors: dict[int, BaseException] = {}
        self.bad: list[BadSample] = []  # failures that are tolerated
        # Workers race to lower it. Losing that race only costs fetches: _collate raises the
        # first of all the errors.
        self.first_error = len(index) if shared else 0
        # Workers take and finish samples at once, without a lock: a step of a counter is one C
        # call that holds the GIL, so no two of them get the same number.
        self._next = itertools.count()
        self._done = itertools.count(1)

    def take(self) -> int | None:
        """Take the next sample: return its position, or None if all are taken."""
        position = next(self._next)
        return position if position < len(self.index) else None

    def finish_one(self) -> bool:
        """Count a sample as done. Return True for the last one: its worker collates."""
        return next(self._done) == len(self.index)
