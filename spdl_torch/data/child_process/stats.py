"""A loader's figures when its workers run in another process."""

from __future__ import annotations

import pickle
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...pipeline.recorder.flight_recorder import FlightRecorder
from ...pipeline.stats.counters import TaskCounters
from ..workers.stats import PoolFigures, Readings

if TYPE_CHECKING:
    from ...observe.verdict.report import Report
    from ...pipeline.recorder.timeline import Timeline
    from ..workers.epoch import Epoch
    from .connection import ChildConnection
    from .shared_memory import Mappings

__all__ = ["ProcessFigures", "ProcessRecorder"]

_ASK_SECONDS = 2.0


class ProcessFigures(PoolFigures):
    """The figures of workers in a child process.

    The stages' figures are as of the last batch received, the trainer's are current. The probes'
    readings are the child's: its GIL, its cores.
    """

    latest: bytes | None = None
    """The pickle of this epoch's last ``Readings``. The receiver replaces it; readers load it."""
    mappings: Mappings | None = None

    def begin(self, epoch: Epoch) -> None:
        """Read the figures of this epoch from now on."""
        self.latest = None
        super().begin(epoch)

    def report(self) -> Report:
        """Return the report, with a remark if batches were copied."""
        report = super().report()
        copied = 0 if self.mappings is None else self.mappings.num_copied
        if not copied or self._epoch is None:
            return report
        remark = (
            f"{copied} batches were copied out of shared memory, because the loop keeps many of "
            "them. If it only needs a part of each, keep a copy of that part."
        )
        verdict = replace(report.verdict, remarks=(*report.verdict.remarks, remark))
        return replace(report, verdict=verdict)

    def _readings_of(self, epoch: Epoch) -> Readings:
        elapsed_ns = epoch.outlet.counters().elapsed_ns
        latest = self.latest
        if latest is None:
            nothing, probes = TaskCounters(elapsed_ns=elapsed_ns), epoch.probes_before
            return Readings(nothing, nothing, 0, probes, probes)
        readings: Readings = pickle.loads(latest)
        return readings._replace(
            fetch=replace(readings.fetch, elapsed_ns=elapsed_ns),
            collate=replace(readings.collate, elapsed_ns=elapsed_ns),
        )


class ProcessRecorder(FlightRecorder):
    """A recorder that adds the child's rows to the trainer's, as long as the child lives."""

    def __init__(self, connection: ChildConnection, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._connection = weakref.ref(connection)

    def timeline(self, since_ns: int = 0) -> Timeline:
        """Return the timeline with the child's rows; asking it takes some milliseconds."""
        own = super().timeline(since_ns)
        connection = self._connection() if self.enabled else None
        theirs: Timeline | None = None
        if connection is not None and not connection.is_over:
            theirs = connection.ask("timeline", timeout=_ASK_SECONDS)
        if theirs is None:
            return own
        rows = [row for row in theirs.rows if row.role == "stage"]
        rows += own.rows
        return replace(
            own,
            rows=tuple(sorted(rows, key=lambda row: (row.position, row.replica))),
            instants=(*own.instants, *theirs.instants),
        )
