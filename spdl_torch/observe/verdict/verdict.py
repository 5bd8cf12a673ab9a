"""The verdict: what holds training back, why, and what to do. A pure function of a reading.

Thresholds on the waiting time are those of TensorFlow's input-pipeline analysis (5 and 20 % of the
step).
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...machine.gil import has_gil
from ...machine.readings import Probes
from ...shown_text import percent, shown_seconds
from .advice import advise
from .causes import SHORT_SECONDS, Cause, is_too_short, num_delivered
from .finding import find

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...engine.statistics import PipelineStats

_INPUT_BOUND = 0.05
_HIGHLY_INPUT_BOUND = 0.20

_STEP_SLOWDOWN = 0.10
_FAILURES = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """One finding with its consequence."""

    cause: Cause
    stage: str | None
    """The name of the bottleneck; None where it is not a stage."""
    wait_ratio: float
    """Share of the time in which the consumer waited for data, 0 to 1."""
    finding: str
    action: str
    gain: float
    """The gain in speed that the action gives, at most: 0.45 = 45 %; infinite where nothing known
    limits it. More workers do no more than the cores and the GIL let them; less work for each item
    may end all waiting."""
    remarks: tuple[str, ...] = ()
    """Further findings: failures, dropped items, pauses."""
    limit: str = ""
    """What limits the speed after that gain: ``the cores``, a stage; "" = the trainer, which no
    longer waits."""


_NOTHING_MEASURED = Verdict(
    cause=Cause.UNKNOWN,
    stage=None,
    wait_ratio=0.0,
    finding="There are no figures: nothing was loaded yet.",
    action="Load for a while, and look again.",
    gain=0.0,
)


def judge(
    stats: PipelineStats, probes: Probes | None = None, *, pooled: Sequence[str] = ()
) -> Verdict:
    """Name what holds training back.

    stats: the statistics of a window without the warm-up.
    probes: without them the cause is inferred from CPU time alone, less surely.
    pooled: stages that share threads, those of a loader's workers, which wait for the trainer's
        requests, not for a source; () = every stage has threads of its own, as in a pipeline.
    """
    probes = probes or Probes(switch_interval=sys.getswitchinterval(), own_gil=not has_gil())
    waiting = stats.consumer_wait_ratio
    if stats.elapsed <= 0:
        return _NOTHING_MEASURED
    remarks = tuple(_remarks(stats, probes))
    has_nothing, is_short = num_delivered(stats.stages) == 0, is_too_short(stats)
    if has_nothing and (is_short or waiting < _INPUT_BOUND or _num_lost(stats)):
        return _nothing_delivered(stats, remarks)
    if is_short:
        return _too_short(stats, remarks)
    if waiting < _INPUT_BOUND:
        return _not_input_bound(stats, probes, pooled, remarks)
    level = "HIGHLY" if waiting >= _HIGHLY_INPUT_BOUND else "moderately"
    finding = f"Training waits for data {percent(waiting)} of the time ({level} input-bound)"
    if has_nothing:
        finding = f"Nothing was delivered. {finding}"
    found = find(stats, probes, pooled)
    advice = advise(stats, probes, pooled, found)
    return Verdict(
        cause=found.cause,
        stage=found.stage.name if found.stage else None,
        wait_ratio=waiting,
        finding=f"{finding}: {found.why}.",
        action=advice.action,
        gain=advice.ceiling.gain,
        remarks=remarks,
        limit=advice.ceiling.limit,
    )


def _too_short(stats: PipelineStats, remarks: tuple[str, ...]) -> Verdict:
    waited = percent(stats.consumer_wait_ratio)
    return Verdict(
        cause=Cause.SHORT,
        stage=None,
        wait_ratio=stats.consumer_wait_ratio,
        finding=f"Training waited for data {waited} of {shown_seconds(stats.elapsed)}, "
        "which is too short to say why.",
        action=f"Load for {SHORT_SECONDS:g} seconds or more, and look again.",
        gain=0.0,
        remarks=remarks,
    )


def _num_lost(stats: PipelineStats) -> int:
    return sum(stage.tasks.num_failures + stage.num_dropped for stage in stats.stages)


def _nothing_delivered(stats: PipelineStats, remarks: tuple[str, ...]) -> Verdict:
    num_lost = _num_lost(stats)
    if num_lost:
        why = "every item failed or was dropped"
        if num_lost < stats.stages[0].tasks.num_tasks:  # others may be under way
            why = f"{num_lost} failed or were dropped, and no other has come through yet"
        action = "Read the notes, and the first errors in the log of spdl_torch."
    elif any(stage.tasks.num_tasks for stage in stats.stages):
        why, action = "the first item is still under way", "Wait for it, and look again."
    else:
        why = "no stage was given any item"
        action = "Look at the source: it may be empty, or make its first item still."
    return Verdict(
        cause=Cause.UNKNOWN,
        stage=None,
        wait_ratio=stats.consumer_wait_ratio,
        finding=f"Nothing was delivered in {shown_seconds(stats.elapsed)}: {why}.",
        action=action,
        gain=0.0,
        remarks=remarks,
    )


def _not_input_bound(
    stats: PipelineStats, probes: Probes, pooled: Sequence[str], remarks: tuple[str, ...]
) -> Verdict:
    waiting, slowdown = stats.consumer_wait_ratio, probes.step_slowdown
    finding = f"Training is not input-bound: it waits for data {percent(waiting)} of the time"
    cause, gain = Cause.CONSUMER, 0.0
    action = "Do nothing: a faster loader would not be noticed."
    if slowdown is not None and slowdown >= _STEP_SLOWDOWN:
        cause, gain = Cause.INTERFERENCE, slowdown
        finding += f", but its steps take {percent(slowdown)} longer than with cached batches"
        action = "Use fewer threads, or ops that hold the GIL less (whole batches in one call)."
        if probes.own_gil:
            action = "Use fewer workers: they take cores, or memory bandwidth, from the step."
    elif slowdown is None and (found := find(stats, probes, pooled)).keeps_the_gil_taken:
        assert found.stage is not None, "guaranteed by keeps_the_gil_taken"
        cause, gain = Cause.INTERFERENCE, math.inf
        finding += f", but its own Python waits for the GIL, which stage {found.stage.name!r} takes"
        processes = 'processes (isolation="process")' if pooled else "a subprocess"
        action = (
            "Compare the step with cached batches (headspace). If it is faster with them, load in "
            f"{processes}, or by ops that hold the GIL less (whole batches in one call)."
        )
    return Verdict(
        cause=cause,
        stage=None,
        wait_ratio=waiting,
        finding=f"{finding}.",
        action=action,
        gain=gain,
        remarks=remarks,
    )


def _remarks(stats: PipelineStats, probes: Probes) -> list[str]:
    remarks = []
    for stage in stats.stages:
        tasks = stage.tasks
        if tasks.num_failures:
            share = tasks.num_failures / tasks.num_tasks
            grave = ", more than the 5 % that should concern you" if share > _FAILURES else ""
            remarks.append(
                f"{stage.name}: {tasks.num_failures} of {tasks.num_tasks} tasks failed "
                f"({percent(share)}{grave})."
            )
        if stage.num_dropped:
            remarks.append(f"{stage.name}: the op dropped {stage.num_dropped} items (None).")
    collecting = probes.gc_ratio or 0.0
    # Of a short window a single collection may be most.
    if collecting >= 0.01 and not is_too_short(stats):
        remarks.append(
            f"Garbage collection takes {percent(collecting)} of the time: call "
            "gc.freeze() before training."
        )
    return remarks
