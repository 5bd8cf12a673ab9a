"""The finding: what holds training back, and why. Verdict, advice and predictions follow from it.

One object decides, so that the sentence that names the cause and the one that says what to do
cannot contradict each other. It names nothing whose figure was not measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .causes import (
    Cause,
    Load,
    bottleneck_of,
    cause_of,
    holder_of_gil,
    is_inline,
    load_of,
    may_wait_for_gil,
    num_delivered,
    others_have_cores,
    own_work,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...engine.statistics import PipelineStats, StageStats
    from ...machine.readings import Probes

_BUSY = 0.5
"""The share of busy time below which a stage does not hold back the others."""
_IDLE = 0.1
"""The share of busy time below which a stage has no part in what its workers wait for."""
_MOSTLY = 0.5
"""The share of the waits from which the sampler is named for them."""
_MANY_ITEMS = 1000
_HANDED_OVER_SECONDS = 5e-4
"""The mean wait up to which waking the threads that hand an item over may be all of it: 0.03 to
0.1 ms between threads, 0.2 to 0.4 ms from a process (measured), on busy cores."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What holds training back while it waits, for whoever asks: report, advice and predictions."""

    cause: Cause
    stage: StageStats | None = None
    """The bottleneck; None where it is not a stage."""
    load: Load | None = None
    """The load of its threads."""
    is_inline: bool = False
    """Whether the loop's own thread loads."""
    is_workers: bool = False
    """Whether these are a loader's workers: threads, or processes with one thread each."""
    may_be_gil: bool = False
    """Whether they may wait for the GIL, though it is not sure."""
    others_have_cores: bool = False
    """Whether other programs have the cores for which they wait."""

    @property
    def crew(self) -> str:
        """The word for those that work."""
        return "workers" if self.is_workers else "threads"

    @property
    def keeps_the_gil_taken(self) -> bool:
        """Whether threads want the GIL most of the time, so that it is seldom free for the training
        loop, even if that does not wait for data.
        """
        return self.cause is Cause.GIL

    @property
    def why(self) -> str:
        """The clause that names the cause."""
        if self.stage is None and self.is_inline and self.cause is Cause.HAND_OVER:
            return "most of it is what the loader itself does for every batch, however small"
        if self.stage is None:
            why = _WITHOUT_STAGE[self.cause].format(crew=self.crew)
            return why + ", which other programs have" * self.others_have_cores
        return f"stage {self.stage.name!r} is the bottleneck{self._because()}"

    def _because(self) -> str:
        if self.may_be_gil:
            return f", and its {self.crew} may wait for the GIL"
        if self.cause is Cause.CPU and self.others_have_cores:
            return f", and its {self.crew} wait for a core, which other programs have"
        if self.cause in (Cause.GIL, Cause.CPU):
            what = "the GIL" if self.cause is Cause.GIL else "a core"
            return f", and its {self.crew} wait for {what}"
        if self.cause is Cause.IO:
            return ", and it waits for storage or a network"
        if self.cause is Cause.THREADS:
            on_helpers = self.load is not None and self.load.is_done_by_helpers
            return ", and it computes all the time" + (", on threads of its own" * on_helpers)
        if self.load is not None and self.load.waits:
            return ", and it waits; for what was not measured"
        return ""


_WITHOUT_STAGE = {
    Cause.UNKNOWN: "the stages keep no statistics, so nothing tells why",
    Cause.SOURCE: "the source is the bottleneck; every stage waits for it",
    Cause.SAMPLER: "the sampler is the bottleneck, from which the loop itself draws",
    Cause.START: "no stage is short of {crew}; the wait is the start of the pass",
    Cause.CPU: "no stage is short of {crew}; the workers wait for a core",
    Cause.HAND_OVER: "no stage is short of {crew}; the wait is for many small results to be "
    "handed over",
}


def find(stats: PipelineStats, probes: Probes, pooled: Sequence[str]) -> Finding:
    """Return what holds back a training that waits; arguments as for :func:`judge`."""
    stage = bottleneck_of(stats.stages)
    is_counted = any(each.tasks.num_tasks for each in stats.stages)
    if stage is not None and not is_counted and num_delivered(stats.stages):
        return Finding(cause=Cause.UNKNOWN, is_workers=bool(pooled))
    if stage is None:
        return Finding(cause=Cause.START, is_workers=bool(pooled))
    is_for_sampler = _is_for_sampler(stats, probes)
    is_for_loader = _is_for_loader(stats, probes, pooled)
    load = load_of(stage, stats.stages, pooled, probes)
    is_workers = stage.name in pooled
    if load.busy < _BUSY and not pooled and stats.stages[0].wait_in_ratio >= _BUSY:
        return Finding(cause=Cause.SOURCE)
    is_crew = bool(pooled) and not is_inline(stats, pooled)
    waits_for_core = is_crew and _waits_for_core(load, probes)
    if waits_for_core and not (is_for_sampler or is_for_loader):
        taken = others_have_cores(load, probes)
        return Finding(cause=Cause.CPU, is_workers=True, others_have_cores=taken)
    if _has_spare_time(load, stats, probes, pooled):
        inline = is_inline(stats, pooled)  # then there is no start to wait for
        is_for_items = inline or is_for_loader or _is_for_all_items(stats)
        cause = Cause.HAND_OVER if is_for_items else Cause.START
        cause = Cause.SAMPLER if is_for_sampler else cause
        return Finding(cause=cause, is_workers=bool(pooled), is_inline=inline)
    cause = cause_of(load, probes)
    # What the loop does itself takes long, too, where it has to wait for a GIL that others have.
    if (is_for_sampler or is_for_loader) and cause is not Cause.GIL:
        cause = Cause.SAMPLER if is_for_sampler else Cause.HAND_OVER
        return Finding(cause=cause, is_workers=bool(pooled))
    may_be_gil = may_wait_for_gil(load, cause, probes)
    if cause is Cause.GIL or may_be_gil:
        stage = holder_of_gil(stage, stats.stages, pooled)
    return Finding(
        cause=Cause.UNKNOWN if may_be_gil else cause,
        stage=stage,
        load=load,
        is_workers=is_workers,
        may_be_gil=may_be_gil,
        others_have_cores=others_have_cores(load, probes),
    )


def _is_for_sampler(stats: PipelineStats, probes: Probes) -> bool:
    """Return whether the loop's waits are mostly draws from its sampler."""
    sampling = probes.sampling_ratio or 0.0
    return sampling > 0 and sampling >= _MOSTLY * stats.consumer_wait_ratio


def _is_for_loader(stats: PipelineStats, probes: Probes, pooled: Sequence[str]) -> bool:
    """Return whether the loop's waits are mostly what it does itself for many small batches that
    workers make, in giving out their jobs and taking them over; not the start of the workers."""
    own = own_work(stats, probes, pooled)
    num_items = num_delivered(stats.stages) or 0
    is_short = own * stats.elapsed <= _HANDED_OVER_SECONDS * num_items
    is_many = not is_inline(stats, pooled) and num_items >= _MANY_ITEMS
    return is_many and is_short and own >= _MOSTLY * stats.consumer_wait_ratio


def _is_for_all_items(stats: PipelineStats) -> bool:
    """Return whether the waits are many and alike, not a few long ones, as at the start of passes:
    with these nine in ten are far below the mean, or of short passes one in ten is far above it.
    """
    if not stats.stages:
        return False
    queue = stats.stages[-1].queue
    mean, long = queue.ave_get_time, queue.p90_get_time
    is_short = 0 < mean <= _HANDED_OVER_SECONDS
    return queue.num_items >= _MANY_ITEMS and is_short and mean / 2 <= long <= 5 * mean


def _waits_for_core(load: Load, probes: Probes) -> bool:
    """Return whether workers wait for a core for most of their time while they are hardly in their
    ops: for many small batches they wake for each, and may wait for a core each time."""
    return load.busy < _IDLE and load.busy + (probes.run_delay_ratio or 0.0) >= _BUSY


def _has_spare_time(
    load: Load, stats: PipelineStats, probes: Probes, pooled: Sequence[str]
) -> bool:
    """Return whether threads with this load have time left for more work."""
    if is_inline(stats, pooled):
        # The loop's own thread loads only while the loop waits, so it cannot be busier than that.
        return load.busy < _BUSY * stats.consumer_wait_ratio
    # Threads may be without a core outside their ops, too.
    return load.busy + (probes.run_delay_ratio or 0.0) < _BUSY
