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
    """A batch."""

    number: int
    batch: Any
    progress: WorkerState | None = None
    """Of the worker's iterable, behind this batch; None = map-style."""
    tries: Tries | None = None
    """None = no sample may fail."""


@dataclass(frozen=True, slots=True)
class NoBatch:
    """None of the batch's samples was good."""

    number: int
    tries: Tries
    progress: WorkerState | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """What came instead of a batch: the user's own exception."""

    number: int
    error: BaseException
    progress: WorkerState | None = None
    tries: Tries | None = None


@dataclass(frozen=True, slots=True)
class Exhausted:
    """This worker's iterable has ended."""

    number: int
    progress: WorkerState | None = None
    tries: Tries | None = None


Result = Loaded | Failed | Exhausted | NoBatch


class Job:
    """One batch to make; if shared, also which of its samples are taken, done or failed."""

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
        self.wants_state = wants_state  # that of the worker's iterable is asked for after it
        self.size = len(index) if isinstance(index, list | tuple) else 1
        self.samples: list[Any] = [None] * len(index) if shared else []
        self.errors: dict[int, BaseException] = {}
        self.bad: list[BadSample] = []  # those that are tolerated
        self.first_error = len(index) if shared else 0
        self._next = itertools.count()  # a step is one C call, so it is atomic
        self._done = itertools.count(1)

    def take(self) -> int | None:
        """The position of a sample that nobody has taken yet."""
        position = next(self._next)
        return position if position < len(self.index) else None

    def finish_one(self) -> bool:
        """Count a sample as done; True for the last one."""
        return next(self._done) == len(self.index)
