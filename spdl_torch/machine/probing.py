"""The probes' readings of one run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .probes import probe_counters, start_probing, stop_probing
from .readings import probes_between

if TYPE_CHECKING:
    from .probes import ProbeCounters
    from .readings import Probes


class Probing:
    """Probing from the start of a run to its end; dropping this ends it, too."""

    def __init__(self) -> None:
        self._before: ProbeCounters | None = None  # it has not begun
        self._after: ProbeCounters | None = None  # it goes on

    def begin(self) -> None:
        """Start probing."""
        start_probing(self)
        self._before = probe_counters()

    def end(self) -> None:
        """Take the last reading. Never blocks."""
        if self._before is not None and self._after is None:
            self._after = probe_counters()
        stop_probing(self)

    def readings(self) -> Probes | None:
        """Return the readings since the start, up to the end; None = it never began."""
        before, after = self._before, self._after
        return None if before is None else probes_between(before, after or probe_counters())
