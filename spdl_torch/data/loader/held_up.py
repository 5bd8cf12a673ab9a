"""Whether worker threads are held up by the GIL, or hold the loop up, or may: then processes are
tried."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ...machine.probes import probe_counters
from ...machine.readings import probes_between
from ...observe.verdict.causes import (
    Cause,
    bottleneck_of,
    load_of,
    may_hide_the_gil,
    may_wait_for_gil,
    use_one_core,
)
from ...observe.verdict.finding import find
from . import trial

if TYPE_CHECKING:
    from ..workers.moving import Moving
    from ..workers.stats import CrewStats

HOLDS_UP = (Cause.GIL,)
"""The verdicts on the threads that lead to a trial of processes."""


def are_held_up(threads: CrewStats, memory: Moving) -> bool:
    """Return whether the loop waits for threads that the GIL holds up, or may; or whether they take
    it all the time, for which the loop waits in whatever it does.
    """
    figures = threads.figures()
    stats, probes, pooled = figures.stats, figures.probes, figures.pooled
    if stats.elapsed < trial.LOOK_SECONDS and memory.stats is not None:
        assert memory.probes_before is not None, "set when the first epoch began"
        alone, stats = probes.one_at_a_time, memory.stats
        probes = probes_between(memory.probes_before, probe_counters())
        probes = replace(probes, one_at_a_time=alone)
    # Not the verdict's: of a short window that names none, and the trial will show.
    found = find(stats, probes, pooled)
    cause = found.cause
    if stats.consumer_wait_ratio < trial.LEAST_WAIT:
        return found.keeps_the_gil_taken
    if cause in HOLDS_UP:
        return True
    # The probe samples ten times a second: it knows nothing of shorter epochs.
    if probes.gil_seconds is None and use_one_core(stats, pooled):
        return True
    stage = bottleneck_of(stats.stages)
    if stage is None:
        return False
    load = load_of(stage, stats.stages, pooled)
    # A trial shows whether they do.
    return may_hide_the_gil(load, cause) or may_wait_for_gil(load, cause, probes)
