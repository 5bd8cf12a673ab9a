"""``num_workers="auto"`` as a number."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .tuning import Tuning

_MOST_AT_FIRST = 8


class AutoWorkers(int):
    """The present number of a loader's workers, marked as tuned while the loader runs.

    It is an int because torch, Lightning and others use it as one and build loaders from it: such a
    copy is tuned as well, and begins with this number.
    """

    tuning: Tuning

    def __new__(cls, count: int, tuning: Tuning) -> AutoWorkers:
        workers = super().__new__(cls, count)
        workers.tuning = tuning
        return workers

    @classmethod
    def to_begin_with(cls, tuning: Tuning) -> AutoWorkers:
        """Return the number to start with: one for each core that this rank may use, up to 8."""
        bounds = tuning.bounds()
        return cls(max(1, min(bounds.threads, _MOST_AT_FIRST, int(bounds.cores + 1e-9))), tuning)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (int(self), self.tuning)
