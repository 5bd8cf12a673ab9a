"""A loader's memory of moving its workers between threads and processes."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...engine.stats.perf_stats import PipelineStats
    from ...machine.probes import ProbeCounters

_logger = logging.getLogger("spdl_torch.data")


@dataclass(slots=True, eq=False, repr=False)
class Tally:
    """The loop's time with workers of one kind, over all epochs but the first, which warms up."""

    num_epochs: int = 0
    """The number of epochs that began with these workers."""
    start_seconds: float = math.inf
    """The least time from the beginning of an epoch to its first batch."""
    seconds: float = 0.0
    """The time from each epoch's first batch to its last."""
    num_batches: int = 0
    """The number of batches in that time, without each epoch's first."""

    def begin(self, seconds: float) -> None:
        """Count the first batch of an epoch, which came after ``seconds``."""
        if self.num_epochs == 1:
            self.seconds, self.num_batches = 0.0, 0
        self.num_epochs += 1
        self.start_seconds = min(self.start_seconds, seconds)

    def add(self, seconds: float) -> None:
        """Count a further batch."""
        self.seconds += seconds
        self.num_batches += 1

    @property
    def batch_seconds(self) -> float:
        """The time of a batch, apart from an epoch's first; 0.0 = there was no other."""
        return self.seconds / self.num_batches if self.num_batches else 0.0

    def epoch_seconds(self, num_batches: int) -> float:
        """Return the time of an epoch of so many batches."""
        return self.start_seconds + (num_batches - 1) * self.batch_seconds


class Moving:
    """The trial of processes by one loader, and its outcome; both hold for all its epochs."""

    def __init__(self) -> None:
        self.has_moved = False
        self.reason = ""
        """Why the workers moved, or why they did not; "" = not tried yet."""
        self.is_on_trial = False
        """Whether epochs begin in processes, until their speed is known."""
        self.threads, self.children = Tally(), Tally()
        self.unlooked_seconds = 0.0
        """The loop's time with threads since the last check of what holds them up."""
        self.stats: PipelineStats | None = None
        """The threads' statistics of their last whole epoch."""
        self.probes_before: ProbeCounters | None = None
        """The probes' counters when the first epoch began."""
        self._num_batches, self._num_batches_before = 0, 0

    @property
    def is_settled(self) -> bool:
        """Whether there is no further trial."""
        return bool(self.reason)

    def begin_epoch(self) -> None:
        """Count the batches of another epoch."""
        if self._num_batches:
            self._num_batches_before, self._num_batches = self._num_batches, 0

    def count(self) -> None:
        """Count a batch."""
        self._num_batches += 1

    @property
    def gain(self) -> float:
        """The speed of the loop with processes over that with threads.

        Where epochs have begun with both kinds of workers, whole epochs are compared, with their
        start; else the time of a batch.
        """
        threads, children = self.threads, self.children
        num_batches = max(self._num_batches, self._num_batches_before)
        if num_batches and math.isfinite(threads.start_seconds + children.start_seconds):
            return threads.epoch_seconds(num_batches) / children.epoch_seconds(num_batches)
        return threads.batch_seconds / max(1e-9, children.batch_seconds)

    def moved(self, gain: float) -> None:
        """Keep that the children were ``gain`` times as fast."""
        self.has_moved, self.is_on_trial = True, False
        self.reason = (
            f"the GIL held the threads up, and with processes the loop was {gain:.2f} times as fast"
        )
        _logger.info("DataLoader: the workers have moved to processes: %s.", self.reason)

    def stays(self, reason: str) -> None:
        """Keep why the workers stay on threads."""
        self.reason, self.is_on_trial = reason, False
        _logger.info("DataLoader: the workers stay on threads: %s.", reason)
