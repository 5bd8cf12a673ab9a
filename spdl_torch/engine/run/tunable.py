"""The interface between a run and its tuner."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from ..definition.specs import PipelineSpec
    from ..hooks.interval_reporter import Reports
    from ..recorder.flight_recorder import FlightRecorder
    from ..stats.perf_stats import PipelineStats


class Adjustable(Protocol):
    """A run whose stages' concurrency may be changed while it runs."""

    @property
    def spec(self) -> PipelineSpec[Any]:
        """The definition of the run."""

    @property
    def recorder(self) -> FlightRecorder:
        """The recorder of moments of note."""

    @property
    def is_taking(self) -> bool:
        """Whether it runs, and the source has more."""

    @property
    def num_delivered(self) -> int:
        """The number of items that the consumer took so far."""

    def snapshot(self) -> PipelineStats:
        """Return the statistics since the start."""

    def set_concurrency(self, stage: str, count: int) -> None:
        """Run at most ``count`` calls of the stage's op at once from now on."""


class Tuner(Protocol):
    """Tunes one run after the other; each starts from the previous result."""

    def attach(self, run: Adjustable) -> Reports:
        """Attach to a new run, none of whose threads exists yet.

        The result is called once in every ``interval``, on the run's reporter thread, and a last
        time at the end of the run.
        """
