"""Warn of worker threads that the GIL holds up, once for each loader."""

from __future__ import annotations

import logging
from math import inf
from time import perf_counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .stats.stats import EpochStats

_logger = logging.getLogger("spdl_torch.data")

LOOK_SECONDS = 10.0
"""The time of loading on threads before each look at what holds them up."""
_SOON = 0.25
"""The part of that after which it looks again where an epoch was too young to say anything."""


class GilWatch:
    """Looks at the verdict on a loader's threads now and then, until it is the GIL. Only the loop's
    thread calls it."""

    def __init__(self) -> None:
        self._due_seconds = 0.0  # 0.0 = the loop has had no batch yet

    def look(self, stats: EpochStats) -> None:
        """Warn if the GIL holds the threads up; 0.1 µs where no look is due."""
        now = perf_counter()
        if now < self._due_seconds:
            return
        is_first, self._due_seconds = not self._due_seconds, now + LOOK_SECONDS
        if is_first:
            return
        # They judge: no first batch waits for their import.
        from ..observe.verdict.causes import Cause
        from ..observe.verdict.report import action_of

        verdict = stats.report().verdict
        if verdict.cause is Cause.SHORT:
            self._due_seconds = now + LOOK_SECONDS * _SOON
        if verdict.cause is Cause.GIL:
            self._due_seconds = inf
            _logger.warning("DataLoader: %s %s", verdict.finding, action_of(verdict))
