"""The loop's time from batch to batch, by the kind of workers that made them."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

from . import move_limits as limits

if TYPE_CHECKING:
    from ..workers.moving import Moving


class Pace:
    """Counts an epoch's batches for the decision where workers live. The loop's thread owns it."""

    def __init__(self, memory: Moving) -> None:
        self._memory = memory
        self._last_seconds = 0.0  # when the epoch began, or the loop had its last batch
        self._num_warm = 0  # the next batches that are not counted: those of a beginning
        self._is_first = False  # whether the epoch's first batch is still to come

    def begin(self, seconds: float) -> None:
        """Begin an epoch, at this time of ``perf_counter()``."""
        self._last_seconds, self._num_warm, self._is_first = seconds, 0, True
        self._memory.begin_epoch()

    def warm_up(self) -> None:
        """Note that batches come from others from now on: the first are those of their start."""
        self._num_warm = limits.TRIAL_BATCHES

    def count(self, *, on_threads: bool, is_typical: bool) -> None:
        """Count the batch that the loop gets now, and the time since the last one. ``is_typical``:
        nothing else slows the workers down."""
        now, memory = perf_counter(), self._memory
        seconds, self._last_seconds = now - self._last_seconds, now
        memory.count()
        if on_threads:
            memory.unlooked_seconds += seconds
        if self._num_warm:
            self._num_warm -= 1
        elif is_typical:
            tally = memory.threads if on_threads else memory.children
            if self._is_first:
                self._is_first = False
                tally.begin(seconds)
            else:
                tally.add(seconds)
