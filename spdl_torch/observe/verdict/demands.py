"""The time one batch takes of workers, cores, GIL and trainer, from the statistics of a window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ...shown_text import shown_seconds
from .causes import (
    SHORT_SECONDS,
    Cause,
    is_inline,
    load_of,
    may_wait_for_gil,
    num_delivered,
    others_have_cores,
    own_work,
    waits_for_others,
)
from .intervals import thread_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...engine.statistics import PipelineStats, StageStats
    from ...machine.readings import Probes
    from .causes import Load
    from .placement import Placement

THE_LOADER = "the loader's work for each batch"
"""What limits the rate where that takes most of the loop's time."""
_FEW_BATCHES = 10
_PROBES_PER_SECOND = 10
_MODEL_ERROR = 0.05
_IDLE = 0.3
"""The share of their time without a job from which workers are not short of time."""


class NotKnown(Exception):
    """Raised with the reason why the statistics give no answer."""


class Between(NamedTuple):
    """A value with its lower bound."""

    low: float
    likely: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What one batch takes of the workers."""

    cpu: float
    """CPU seconds in their ops."""
    waits: Between
    """Seconds in which the ops wait for storage or a network, not for the GIL or a core."""
    overhead: float
    """A worker's seconds outside its ops: taking jobs, handing batches on."""
    fetch_ratio: float
    """Share of the ops' time that is spent on samples, rather than on collating them."""
    copy: float
    """Seconds to collate a batch: about those of copying it once."""
    num_fetches: float
    """Calls of the dataset."""


class GilUse(NamedTuple):
    """The GIL of the process in which the workers are."""

    held: Between | None
    """Seconds for which one batch holds a GIL that the workers share; None = not measured."""
    is_cause: bool
    """Whether it holds training back."""
    is_own: bool
    """Whether no worker shares it with another."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Demands:
    """The seconds that one batch takes of every resource; a pipeline's items count as batches."""

    rate: float
    """Batches a second that were delivered."""
    num_workers: int
    """0 = the trainer's own thread loads."""
    num_processes: int
    """0 = the workers are threads of the training process."""
    work: Work
    other_cpu: float
    """CPU seconds of everything outside the workers' ops, the trainer included."""
    gil: GilUse
    step: float
    """The trainer's seconds without waiting, its draws from the sampler included."""
    loop: str
    """What takes most of these: ``the trainer``, or ``the sampler``."""
    stages: tuple[tuple[str, float], ...]
    """The other stages, each with the seconds between two of its items if it never waited."""
    num_cores: float
    error: float
    """The relative error of these numbers, a standard deviation or two."""
    stage: str
    """The stage whose threads are the workers; "" = a loader's."""


def demands_of(
    stats: PipelineStats,
    probes: Probes,
    cause: Cause,
    pooled: Sequence[str],
    placement: Placement | None,
) -> Demands:
    """Return what a batch takes. Raises: NotKnown."""
    num_batches = _enough_batches(stats)
    if probes.num_cores is None:
        raise NotKnown("the number of cores is unknown")
    if probes.cores_used is None:
        raise NotKnown("the CPU time of the training process was not measured")
    own = _workers_stages(stats.stages, cause, pooled)
    load = load_of(max(own, key=lambda stage: stage.busy_ratio), stats.stages, pooled, probes)
    _check_turns(load, cause, probes)
    _check_cores(load, probes)
    if load.is_done_by_helpers:
        raise NotKnown("calls start threads of their own, whose part of a batch is not known")
    seconds = stats.elapsed / num_batches
    inline = is_inline(stats, pooled)
    num_workers = _num_workers(own[0], placement, inline)
    ops = _ops_of(own, num_batches)
    is_gil_bound = cause is Cause.GIL
    has = seconds if inline else thread_seconds(own[0]) / num_batches
    waits = ops.busy - ops.cpu
    waits -= min(waits, (probes.run_delay_ratio or 0.0) * has)
    gil, most_held = None, 0.0
    if not inline:
        gil, most_held = _gil_seconds(probes, stats.elapsed, seconds, num_workers, is_gil_bound)
    has_other_work = pooled and not inline and not is_gil_bound
    idle = own[0].wait_in_ratio + own[0].wait_out_ratio
    fetch = own[0].tasks
    return Demands(
        rate=num_batches / stats.elapsed,
        num_workers=num_workers,
        num_processes=placement.num_processes if placement else 0,
        work=Work(
            cpu=ops.cpu,
            waits=_waits(waits, most_held, probes, num_workers, is_gil_bound),
            overhead=max(0.0, has * (1 - idle) - ops.busy) if has_other_work else 0.0,
            fetch_ratio=fetch.busy_time / max(1e-12, num_batches * ops.busy),
            copy=sum(stage.tasks.busy_time for stage in own[1:]) / num_batches,
            num_fetches=fetch.num_tasks / num_batches,
        ),
        other_cpu=max(0.0, probes.cores_used * seconds - ops.cpu),
        gil=GilUse(gil, is_gil_bound, probes.own_gil),
        # What the loop does itself in the loader, such as to draw from the sampler, is its work.
        step=(1 - waits_for_others(stats, pooled)) * seconds,
        loop=_most_of_step(stats, probes, pooled),
        stages=tuple(
            (stage.name, stage.busy_ratio * seconds)
            for stage in stats.stages
            if stage not in own and stage.busy_ratio > 0
        ),
        num_cores=probes.num_cores,
        error=_MODEL_ERROR + _sampling_error(fetch),
        stage="" if pooled else own[0].name,
    )


def _most_of_step(stats: PipelineStats, probes: Probes, pooled: Sequence[str]) -> str:
    """Return what takes most of the loop's time in which it does not wait for others."""
    shares = {
        "the trainer": 1 - stats.consumer_wait_ratio,
        "the sampler": probes.sampling_ratio or 0.0,
        THE_LOADER: own_work(stats, probes, pooled),
    }
    return max(shares, key=lambda name: shares[name])


class _Ops(NamedTuple):
    """The seconds that a batch spends in the workers' ops."""

    busy: float
    cpu: float


def _ops_of(stages: Sequence[StageStats], num_batches: int) -> _Ops:
    tasks = [stage.tasks for stage in stages]
    busy = sum(each.busy_time for each in tasks) / num_batches
    cpu = min(busy, sum(each.ave_cpu_time * each.num_tasks for each in tasks) / num_batches)
    return _Ops(busy, cpu)


def _num_workers(stage: StageStats, placement: Placement | None, inline: bool) -> int:
    if inline:
        return 0
    return max(1, stage.concurrency if placement is None else placement.num_workers)


def _enough_batches(stats: PipelineStats) -> int:
    num_batches = num_delivered(stats.stages) or 0
    if not num_batches:
        raise NotKnown("nothing was delivered")
    if stats.elapsed < SHORT_SECONDS:
        raise NotKnown(f"the window is short, {shown_seconds(stats.elapsed)}")
    if num_batches < _FEW_BATCHES:
        raise NotKnown(f"only {num_batches} batches were delivered")
    return num_batches


def _workers_stages(
    stages: Sequence[StageStats], cause: Cause, pooled: Sequence[str]
) -> list[StageStats]:
    """Return the stages of a loader's workers, or the busiest one of a pipeline."""
    is_short_of_time = pooled and stages and stages[0].wait_in_ratio < _IDLE
    if cause is Cause.START and not is_short_of_time:
        raise NotKnown("the wait is the start of the pass, and no worker is short of time")
    if cause is Cause.HAND_OVER and not is_short_of_time:
        raise NotKnown("batches wait to be handed over, and no worker is short of time")
    if cause is Cause.SOURCE:
        raise NotKnown("every stage waits for the source, whose time is not measured")
    if pooled:
        return [stage for stage in stages if stage.name in pooled]
    return [max(stages, key=lambda stage: stage.busy_ratio)]


def _gil_seconds(
    probes: Probes, elapsed: float, seconds: float, num_workers: int, is_gil_bound: bool
) -> tuple[Between | None, float]:
    """Return the seconds per batch in which the GIL is held, as far as the probe saw, and the most
    that it may be: it does not see holds of less than half a millisecond.
    """
    if probes.own_gil:
        return Between(0.0, 0.0), 0.0
    held = probes.gil_held_ratio
    if is_gil_bound:  # one worker may share the GIL with the trainer, and for less of the time
        least = 0.85 if num_workers > 1 or held is None else min(0.85, held)
        return Between(least * seconds, seconds), seconds
    if held is None:
        return None, 0.0
    spread = 2 * (held * (1 - held) / max(1.0, _PROBES_PER_SECOND * elapsed)) ** 0.5
    most = min(1.0, held + spread) * seconds
    return Between(max(0.0, held - spread) * seconds, held * seconds), most


def _waits(
    rest: float, most_held: float, probes: Probes, num_workers: int, is_gil_bound: bool
) -> Between:
    """Return the seconds for which the ops of a batch wait by themselves, out of ``rest``, their
    wall time without CPU time and waits for a core.

    most_held: the most seconds for which a batch may hold the GIL.
    """
    if num_workers <= 1 or most_held == 0:
        return Between(rest, rest)
    if is_gil_bound:
        return Between(0.0, 0.0)
    # Each of the others holds the GIL once while a batch is made.
    meetings = min(rest, (num_workers - 1) * most_held) * (probes.gil_held_ratio or 0.0)
    return Between(rest - meetings, rest - meetings / 2)


def _check_turns(load: Load, cause: Cause, probes: Probes) -> None:
    """Raise if the workers seem to take something in turns, and nothing shows what it is."""
    if cause is Cause.GIL:
        return
    if may_wait_for_gil(load, cause, probes):
        raise NotKnown("the workers may wait for the GIL, and the figures do not show for how long")


def _check_cores(load: Load, probes: Probes) -> None:
    """Raise if other programs take the cores that the workers would use."""
    if others_have_cores(load, probes):
        delay = probes.run_delay_ratio or 0.0
        raise NotKnown(
            f"the workers had no core for {100 * delay:.0f} % of their time, though this training "
            f"used {probes.cores_used:.1f} of {probes.num_cores:g}: other programs took them"
        )


def _sampling_error(tasks: object) -> float:
    """Return twice the relative standard error of the mean time of a call."""
    mean, p50, p90 = (getattr(tasks, name) for name in ("ave_time", "p50_time", "p90_time"))
    number = getattr(tasks, "num_tasks", 0)
    if mean <= 0 or number < 1:
        return 0.0
    deviation = max(0.0, p90 - p50) / 1.28
    return float(2 * deviation / mean / number**0.5)
