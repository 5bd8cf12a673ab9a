"""The place where a loader's workers live, and the reason: a part of its report."""

from __future__ import annotations

from dataclasses import dataclass

from ...shown_text import counted


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """The place where a loader's workers live, and the reason."""

    num_workers: int
    num_processes: int
    """The number of worker processes; 0 = the workers are threads of the training process."""
    reason: str
    remedy: str = ""
    """A sentence on what would let workers in processes run on threads; "" = they do."""

    def __str__(self) -> str:
        """Return the sentences for the log and the report."""
        where = f"on {counted(self.num_workers, 'thread')} of the training process"
        if self.num_processes:
            where = f"in {counted(self.num_processes, 'process')}"
        return " ".join(filter(None, (f"{where}: {self.reason}.", self.remedy)))
