"""The place where a loader's workers live, and the reason: a part of its report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from ...shown_text import counted

PLACEMENT_EVENT = "placement"
"""Name of the event that says where a loader's workers live from that moment on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """The place where a loader's workers live from a moment on, and the reason."""

    num_workers: int
    num_processes: int
    """The number of worker processes; 0 = the workers are threads of the training process."""
    reason: str
    remedy: str = ""
    """A sentence on what would let workers in processes run on threads; "" = they do."""
    since: float | None = None
    """The moment, in seconds since 1970; None = it is still to come."""

    def __str__(self) -> str:
        """Return the sentences for the log and the report."""
        return " ".join(filter(None, (f"{self.where}: {self.reason}.", self.remedy)))

    @property
    def where(self) -> str:
        """The place alone: ``in 2 processes``."""
        if self.num_processes:
            return f"in {counted(self.num_processes, 'process')}"
        return f"on {counted(self.num_workers, 'thread')} of the training process"

    def is_as(self, other: Placement | None) -> bool:
        """Return whether both say the same, apart from the moment."""
        return other is not None and {**asdict(self), "since": 0} == {**asdict(other), "since": 0}

    def as_details(self) -> dict[str, Any]:
        """Return the form in which a statistics file and a trace have it, without the moment."""
        return {name: value for name, value in asdict(self).items() if name != "since"}

    @classmethod
    def from_details(cls, details: Mapping[str, Any], since: float | None) -> Self:
        """Return the placement from the result of :meth:`as_details`, which may have more keys."""
        names = ("num_workers", "num_processes", "reason", "remedy")
        return cls(**{name: details[name] for name in names}, since=since)


def moves(placements: Iterable[Placement], before: Placement | None = None) -> list[Placement]:
    """Return those that say something else than the one before each."""
    found: list[Placement] = []
    for each in placements:
        if not each.is_as(found[-1] if found else before):
            found.append(each)
    return found


def lines_of(placements: Sequence[Placement]) -> list[str]:
    """Return a line for each place, with the time since the first one. Only the last place, where
    the workers are, has its remedy there.
    """
    lines: list[str] = []
    for placement in placements:
        seconds = (placement.since or 0.0) - (placements[0].since or 0.0)
        after = f"after {seconds:.1f} s " if lines else ""
        is_last = placement is placements[-1]
        lines.append(after + str(placement if is_last else replace(placement, remedy="")))
    return lines
