"""The statistics of a trainer's loaders in a file: each call of the trainer is a run in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..autotune.tuning import decision_entry
from ..observe.store.entries import entries_of
from ..observe.store.recording import path_of_rank
from ..observe.store.skipped import SkippedLog
from ..observe.store.writer import SQLiteStatsWriter

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from ..autotune.tuner import Decision
    from ..observe.verdict.report import Report


class LoadersFile:
    """Writes what each loader did, left out and changed since the last time.

    A loader is known by its split (``train``, ``val``, ...) and its name among several.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path
        self._writer: SQLiteStatsWriter | None = None
        self._numbers: dict[str, int] = {}
        self._skipped: dict[tuple[str, str], SkippedLog] = {}
        self._last_decision: dict[tuple[str, str], float] = {}

    def open(self, trainer: str, rank: int, world_size: int) -> None:
        """Begin a run. ``trainer``: what it is called to do."""
        self.close()
        path = path_of_rank(self._path, rank, world_size)
        config = {"trainer": trainer}
        self._writer = SQLiteStatsWriter(path, config=config, rank=rank, world_size=world_size)
        self._writer.start()

    def close(self) -> None:
        """Write what is left, and end the run, if there is one."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.shutdown()
        self._numbers.clear()  # the next run numbers its own

    def number_of(self, split: str, name: str) -> int:
        """Return the number of a loader in the file; the first that is asked for comes first."""
        return self._numbers.setdefault(split_and(split, name), len(self._numbers))

    def write(self, split: str, name: str, report: Report, before: Report | None) -> None:
        """Write the statistics of a loader from ``before`` to ``report``."""
        if self._writer is not None:
            number = self.number_of(split, name)
            whose = split_and(split, name)
            for entry in entries_of(report, before, pipeline_id=number, name=whose):
                self._writer.log(entry)

    def write_events(self, split: str, name: str, source: Any) -> None:
        """Write the samples that a loader has left out, and the changes that tuning has made, since
        the last time."""
        place = split, name
        skipped = self._skipped.setdefault(place, SkippedLog())
        for entry in skipped.entries(source, self.number_of(split, name)):
            if self._writer is not None:
                self._writer.log(entry)
        decisions: Sequence[Decision] = getattr(source, "decisions", ())
        before = self._last_decision.get(place, 0.0)
        for decision in decisions:
            if self._writer is not None and decision.timestamp > before:
                self._writer.log(decision_entry(decision, pipeline=self.number_of(split, name)))
        if decisions:
            self._last_decision[place] = decisions[-1].timestamp


def split_and(split: str, name: str) -> str:
    """Return a loader's name with its split in front."""
    return f"{split}/{name}" if name else split
