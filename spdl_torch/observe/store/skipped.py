"""The samples that ``on_error="skip"`` left out, as events in a statistics file."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from ..page.events import SKIPPED
from ..verdict.skipped import MOST_KEPT, key_text, remarks_on_left_out
from .entries import EventLogEntry

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ...engine.statistics import PipelineStats


class SkippedLog:
    """What is new among the samples that a loader has left out."""

    def __init__(self, loader: Any = None) -> None:
        """``loader``: what it has left out up to now is not new; None = all is."""
        self._last: Any = next(reversed(_skipped_of(loader)), None)

    def entries(self, loader: Any, pipeline_id: int) -> Iterator[EventLogEntry]:
        """Yield an event for each sample that was left out since the last call."""
        samples = _skipped_of(loader)
        # The list keeps only the last thousand, and begins anew with each epoch: its length says
        # nothing.
        places = (number for number, each in enumerate(samples, 1) if each is self._last)
        for sample in samples[next(places, 0) :]:
            details = {"pipeline": pipeline_id, "key": key_text(sample.key)}
            details |= {"stage": sample.stage, "error": str(sample.error)}
            yield EventLogEntry(time.time(), SKIPPED, details)
            self._last = sample


def _skipped_of(loader: Any) -> Sequence[Any]:
    return getattr(loader, "skipped", ())


def remarks_of_events(
    events: Iterable[EventLogEntry], pipeline: int, stats: PipelineStats
) -> tuple[str, ...]:
    """Return the remark of a report on a stored run that names the samples that were left out.

    events: of the name ``skipped``; those of the program's own may have any details.
    stats: of the run; they count every call of the dataset that failed.
    """
    samples = [
        (event.details["key"], str(event.details["error"]))
        for event in events
        if event.details.get("pipeline") == pipeline and {"key", "error"} <= event.details.keys()
    ]
    # More than a loader remembers may have failed between two readings, so that some have no event.
    # With fewer, the others that failed are in batches that the loop has not taken.
    number = len(samples)
    if number >= MOST_KEPT:
        failed = [each.tasks.num_failures for each in stats.stages if each.name == "fetch"]
        number = max(number, *failed)
    return remarks_on_left_out(samples, number)
