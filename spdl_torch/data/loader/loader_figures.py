"""What a loader reports: the statistics of its last epoch, and what goes with them."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

from ...engine.recorder.flight_recorder import new_pipeline_number

if TYPE_CHECKING:
    from ..workers.stats import EpochStats


class LoaderFigures:
    """What was measured of one loader."""

    def __init__(self) -> None:
        self.pipeline_number = new_pipeline_number()
        """The number of the loader in traces, the same for all its epochs."""
        self.stats: EpochStats | None = None
        """The statistics of the running epoch or, between epochs, of the last one."""
        self.start: WorkersStart | None = None
        """How the workers of the last epoch began that had new ones; None = none has."""
        self.cached_step: float | None = None
        """The seconds of a training step over cached batches, if ``headspace()`` measured it."""


class WorkersStart:
    """How long an epoch with new workers takes to begin, from here on."""

    def __init__(self) -> None:
        self._began_seconds = perf_counter()
        self.start_seconds = 0.0
        """The time before the statistics of the epoch begin."""
        self.first_seconds: float | None = None
        """The time to the first batch; None = there is none yet."""

    def have_begun(self) -> None:
        """Note that the workers have begun the epoch, and its statistics with them."""
        self.start_seconds = perf_counter() - self._began_seconds

    def had_first(self) -> None:
        """Note that the first batch is here."""
        self.first_seconds = perf_counter() - self._began_seconds
