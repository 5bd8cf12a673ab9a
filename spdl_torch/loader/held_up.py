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
        from ..observe.verdict.causes import Cause  # judges: no first batch waits for its import

        verdict = stats.report().verdict
        if verdict.cause is Cause.GIL:
            self._due_seconds = inf
            _logger.warning(
                "DataLoader: %s Worker processes share no GIL: if the workers cannot be made to "
                'release it, isolation="process" loads there.',
                verdict.finding,
            )
