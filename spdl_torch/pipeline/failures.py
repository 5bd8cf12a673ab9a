"""How many failures a stage may have, and what is kept of them."""

from __future__ import annotations

import logging
import math
import os
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .definition import MaxFailures

__all__ = ["DEFAULT_MAX_FAILURES", "FailureBudget", "add_note", "describe"]

_logger = logging.getLogger("spdl_torch.pipeline")

DEFAULT_MAX_FAILURES = 0.1
_PROBATION_TASKS = 100  # SPDL's figure: a share of fewer tasks says little
_KEPT_ERRORS = 20  # of a stage; enough to see a pattern, few enough to keep their frames alive
_LOGGED_ERRORS = 10


class FailureBudget:
    """Counts one stage's failing items and says when there are too many."""

    def __init__(self, stage: str, limit: MaxFailures | None) -> None:
        self._stage = stage
        self._limit: Any = DEFAULT_MAX_FAILURES if limit is None else limit
        if self._limit == -1:
            self._limit = math.inf  # SPDL's word for no limit
        self._lock = threading.Lock()
        self.num_failures = 0
        self.errors: list[Exception] = []

    def spend(self, error: Exception, num_tasks: int) -> bool:
        """Count a failure; True if the budget is now overdrawn."""
        with self._lock:
            self.num_failures += 1
            count = self.num_failures
            if count <= _KEPT_ERRORS:
                self.errors.append(error)
        self._tell(error, count, num_tasks)
        return self._exceeded(num_tasks)

    def overdrawn_at_end(self, num_tasks: int) -> bool:
        """Judge the stage after its last task."""
        self._tell_all(num_tasks)
        return self._exceeded(num_tasks) or self.nothing_succeeded(num_tasks)

    def nothing_succeeded(self, num_tasks: int) -> bool:
        """Whether every task failed, and the limit is a share of fewer."""
        is_share = not isinstance(self._limit, int) and self._limit < 1
        return is_share and 0 < num_tasks <= self.num_failures

    def message(self, num_tasks: int) -> str:
        """What a :class:`PipelineFailure` says."""
        limit = self._limit if isinstance(self._limit, int) else f"{float(self._limit):.4g} of all"
        return (
            f"stage {self._stage!r}: {self.num_failures} of {num_tasks} tasks failed, "
            f"max_failures is {limit}. Mend the items below or raise max_failures"
        )

    def _tell(self, error: Exception, count: int, num_tasks: int) -> None:
        """Log one failure, the ``count``-th."""
        if count <= _LOGGED_ERRORS:
            _logger.error("%s: %s; the item is dropped.", _last_note(error), _one_line(error))

    def _tell_all(self, num_tasks: int) -> None:
        """Log how many there were, after the last task."""
        if self.num_failures > _LOGGED_ERRORS:
            _logger.error(
                "stage %r: %d of %d items failed and were dropped; the first %d are logged.",
                *(self._stage, self.num_failures, num_tasks, _LOGGED_ERRORS),
            )

    def _exceeded(self, num_tasks: int) -> bool:
        if isinstance(self._limit, int):
            return self.num_failures > self._limit
        return num_tasks >= _PROBATION_TASKS and self.num_failures > self._limit * num_tasks


def add_note(error: BaseException, stage: str, thread: str, number: int, item: Any) -> None:
    """Say on the user's own exception where it happened."""
    error.add_note(f"in stage {stage!r} ({thread}), item {number}: {describe(item)}")


def describe(item: Any) -> str:
    """An item in one short line; arrays and tensors by type and shape, never by their values."""
    if isinstance(item, str | bytes | int | float | bool | os.PathLike | None):
        text = repr(item)
    elif (shape := getattr(item, "shape", None)) is not None:
        text = f"{type(item).__name__} of shape {tuple(shape)}"
    elif isinstance(item, tuple | list) and item:
        text = f"{type(item).__name__} of {len(item)}: {describe(item[0])}, ..."
    else:
        text = f"{type(item).__name__} object"
    return text if len(text) <= 200 else f"{text[:197]}..."


def _last_note(error: BaseException) -> str:
    return str(getattr(error, "__notes__", ["in a stage"])[-1])


def _one_line(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}"
    return text if len(text) <= 500 else f"{text[:497]}..."
