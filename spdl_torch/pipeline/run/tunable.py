"""What a run and whoever tunes it know of each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..definition.specs import PipelineSpec
    from ..hooks.interval_reporter import Reports
    from ..recorder.flight_recorder import FlightRecorder
    from ..stats.perf_stats import PipelineStats

__all__ = ["Adjustable", "Tuner"]


class Adjustable(Protocol):
    """A run whose stages' concurrency may be changed while it runs."""

    @property
    def spec(self) -> PipelineSpec[Any]:
        """As it was defined."""

    @property
    def recorder(self) -> FlightRecorder:
        """Where moments worth keeping are noted."""

    @property
    def is_taking(self) -> bool:
        """Whether it runs, and the source has more."""

    @property
    def num_delivered(self) -> int:
        """Items that the consumer took so far."""

    def stats(self) -> PipelineStats:
        """Figures since the start."""

    def set_concurrency(self, stage: str, count: int) -> None:
        """Run at most ``count`` calls of the stage's op at once from now on."""

    def set_room(self, room: Mapping[str, int]) -> None:
        """Let that many items wait behind each stage named, if that is more than now."""


class Tuner(Protocol):
    """Whoever tunes runs; it may have known earlier ones."""

    def attach(self, run: Adjustable) -> Reports:
        """A run was made; no thread of it exists yet.

        What this returns is called once in every ``interval`` on the run's reporter thread, and a
        last time at its end.
        """
