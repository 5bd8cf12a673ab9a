"""Predictions: how many batches a second other settings would deliver at most.

A model with few parts: a batch takes a worker, a core, the GIL and the trainer for the seconds that
were measured, and the busiest resource limits all. The bound covers the error of measurement, and
causes that the statistics do not separate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ...shown_text import counted, shown_rate
from .causes import Cause
from .closed_network import most_rate, random_rate
from .demands import Between, NotKnown, demands_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...engine.statistics import PipelineStats
    from ...machine.readings import Probes
    from .demands import Demands
    from .placement import Placement

_OTHERWISE = 1.25
"""The factor between the measured and the computed rate of the present settings above which the
model is missing something."""
_MOSTLY_STEADY = 0.7
"""The weight of the rate for times that do not vary, against that for random ones."""
_HARDLY_WAITS = 0.1
"""The share of a worker's time without a core below which another one finds no gaps to fill."""
_CACHE_HIT_SECONDS = 30e-6
"""The time of finding a sample in a cache, without copying it."""
_HAND_OVER_SECONDS = Between(0.1e-3, 0.35e-3)
"""The CPU time that a batch takes to come out of a process, whatever its size: in the process, in
the receiving threads and in the loop's (measured: 0.3 to 0.4 ms)."""
_HAND_OVER_COPIES = Between(0.3, 1.0)
"""The same in proportion to its size, in multiples of collating it: memory that two processes share
is written, and is in nobody's cache (measured: about once)."""
_LOOP_SECONDS = Between(0.07e-3, 0.1e-3)
"""The time of the loop's thread for a batch that workers make, whatever its size, which one without
workers saves: to ask for it and to take it over (measured: 0.06 ms where batches are ready, 0.1 to
0.15 ms where threads are woken for each)."""
_INPUT_BOUND = 0.05
_MOST_SHOWN = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """The highest rate of loading and training with other settings."""

    setting: str
    """``8 workers``"""
    base_rate: float
    """Batches a second as measured, with the present settings; 0.0 = none."""
    high: float | None = None
    """Batches a second, at most; None = it cannot be known, for the ``reason``."""
    limit: str = ""
    """The limit of the rate then: ``the trainer``, ``the sampler``, ``the cores``, ``the GIL``,
    ``the workers``, or a stage."""
    assumption: str = ""
    reason: str = ""
    """Why the rate cannot be known; "" = it is."""

    @property
    def gain(self) -> float | None:
        """The gain in speed, at most: 0.45 = 45 %; None = it cannot be known."""
        return None if self.high is None else self.high / self.base_rate - 1

    def __str__(self) -> str:
        """Return a sentence: ``8 workers: at most 430 batches/s, +55 %; then the trainer is the
        limit.``
        """
        if self.high is None:
            return f"{self.setting}: cannot be known: {self.reason}."
        gain = f"{100 * (self.gain or 0.0):+.0f} %"
        then = f"; then {limiting(self.limit)}"
        if self.assumption:
            then += f", if {self.assumption}"
        return f"{self.setting}: at most {shown_rate(self.high)} batches/s, {gain}{then}."


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """Settings that differ from the present ones.

    Raises: ValueError: a value out of range, or nothing differs.
    """

    num_workers: int | None = None
    """None = as many as now, or as processes."""
    processes: int | None = None
    """Workers in processes of their own; 0 = on threads of the training process; None = where they
    are now."""
    cache: bool = False
    read_speedup: float = 1.0

    def __post_init__(self) -> None:
        for name, least in (("num_workers", 0), ("processes", 0)):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or value < least):
                raise ValueError(f"what_if: {name} must be >= {least} or None, got {value!r}.")
        if not 0 < self.read_speedup < math.inf:
            raise ValueError(f"what_if: read_speedup must be > 0, got {self.read_speedup!r}.")
        changes = self.num_workers, self.processes, self.cache or None
        if changes == (None, None, None) and self.read_speedup == 1:
            raise ValueError(
                "what_if: expected a setting to change, got none. Pass num_workers, processes, "
                "cache=True or read_speedup."
            )
        if self.processes and self.num_workers not in (None, self.processes):
            raise ValueError(
                "what_if: processes must be num_workers or 0, got "
                f"{self.processes} and num_workers={self.num_workers}. Each process is one worker."
            )

    def __str__(self) -> str:
        """Return the settings: ``8 workers on threads, a cache``."""
        workers = "" if self.num_workers is None else counted(self.num_workers, "worker")
        if self.processes:
            workers = counted(self.processes, "process")
        elif self.processes == 0:
            workers = f"{workers} on threads" if workers else "threads"
        cache = "a cache" if self.cache else ""
        reads = "" if self.read_speedup == 1 else f"reads {self.read_speedup:g}x as fast"
        return ", ".join(filter(None, (workers, cache, reads)))


def limiting(limit: str) -> str:
    """Return the clause: ``the cores are the limit``."""
    return f"{limit} {'are' if limit.endswith('s') else 'is'} the limit"


def predict(
    question: Question,
    stats: PipelineStats,
    probes: Probes,
    cause: Cause,
    *,
    pooled: Sequence[str] = (),
    placement: Placement | None = None,
) -> Prediction:
    """Return what the settings would give, where ``cause`` is what holds training back now; other
    arguments as those of a :class:`Report`."""
    try:
        now = demands_of(stats, probes, cause, pooled, placement)
    except NotKnown as unknown:
        return Prediction(setting=str(question), base_rate=0.0, reason=str(unknown))
    try:
        found = estimate(question, now)
    except NotKnown as unknown:
        return Prediction(setting=str(question), base_rate=now.rate, reason=str(unknown))
    return Prediction(
        setting=str(question),
        base_rate=now.rate,
        high=found.high,
        limit=found.limit,
        assumption=_assumption(question, now),
    )


def worth_asking(
    stats: PipelineStats,
    bottleneck: str | None,
    cause: Cause,
    pooled: Sequence[str],
    placement: Placement | None,
) -> list[Question]:
    """Return the questions that a report answers unasked, none where nothing can be gained."""
    if stats.consumer_wait_ratio < _INPUT_BOUND or bottleneck is None:
        return []
    stage = next(stage for stage in stats.stages if stage.name == bottleneck)
    count = placement.num_workers if placement is not None else stage.concurrency
    if stage.queue.elapsed == 0 and pooled:
        count = 0
    asked = [Question(num_workers=2 * count or 2)]
    on_threads = placement is not None and not placement.num_processes
    if on_threads and cause is Cause.GIL:
        asked.append(Question(processes=max(2, count)))
    if cause is Cause.IO:
        asked.append(Question(read_speedup=2.0))
    if bottleneck in pooled:
        asked.append(Question(cache=True))
    return asked[:_MOST_SHOWN]


class _Costs(NamedTuple):
    """The workers, and the seconds that a batch takes of one, of the cores, of the GIL and of the
    loop."""

    num_workers: int
    worker: float
    core: float
    """The CPU time of a batch, divided by the number of cores."""
    gil: float
    step: float


class Estimate(NamedTuple):
    """What the model finds for other settings, for the advice: batches a second."""

    base_rate: float
    rate: float
    """The rate to expect."""
    high: float
    limit: str

    @property
    def gain(self) -> float:
        """The gain in speed to expect."""
        return self.rate / self.base_rate - 1

    @property
    def most(self) -> float:
        """The gain in speed, at most."""
        return self.high / self.base_rate - 1


def estimate(question: Question, now: Demands) -> Estimate:
    """Return what the settings would give. Raises: NotKnown."""
    (rate, limit), (high, _) = (
        _rate(_costs_of(question, now, side), now, side, _as_computed(now, side))
        for side in ("likely", "high")
    )
    return Estimate(now.rate, rate, max(high, rate) * (1 + now.error), limit)


def _as_computed(now: Demands, side: str) -> float:
    """Return the measured rate of the present settings over the computed one. Raises: NotKnown."""
    computed, _ = _rate(_costs_of(Question(num_workers=now.num_workers), now, side), now, side)
    # If the model does not know what limits the present settings, it knows little about others.
    if side == "likely" and not 1 / _OTHERWISE <= now.rate / computed <= _OTHERWISE:
        raise NotKnown(
            f"{shown_rate(computed)} batches/s would be expected of the present settings, and "
            f"{shown_rate(now.rate)} were measured, so something else counts: the workers' start, "
            "or other programs"
        )
    return min(_OTHERWISE, max(1 / _OTHERWISE, now.rate / computed))


def _rate(costs: _Costs, now: Demands, side: str, as_computed: float = 1.0) -> tuple[float, str]:
    """Return the batches a second, and what limits them."""
    if not costs.num_workers:
        return as_computed / (costs.worker + costs.step), now.loop
    shared = max(costs.core, costs.gil)
    elsewhere = max(0.0, costs.worker - shared)
    useful = _at_odds(costs, now)
    steady = most_rate(costs.num_workers if side == "high" else useful, shared, elsewhere)
    varied = random_rate(useful, shared, elsewhere)
    weight = _MOSTLY_STEADY if side == "likely" else 1.0
    workers = weight * steady + (1 - weight) * varied
    name = f"stage {now.stage!r}" if now.stage else "the workers"
    if costs.num_workers * shared > costs.worker:
        name = "the GIL" if costs.gil > costs.core else "the cores"
    limits = [(as_computed * workers, name)]
    limits += [(1 / seconds, f"stage {stage!r}") for stage, seconds in now.stages]
    if costs.step > 0:
        limits.append((1 / costs.step, now.loop))
    return min(limits)


def _at_odds(costs: _Costs, now: Demands) -> int:
    """Return how many of the workers ever run while others wait. Beyond the number of cores these
    are the ones that wait for storage: the rest only take a core from each other, and were measured
    to gain nothing.
    """
    beyond = max(0, costs.num_workers - max(1, int(now.num_cores)))
    if not beyond or costs.gil > costs.core:
        return costs.num_workers
    waiting = max(0.0, 1 - costs.core * now.num_cores / costs.worker) if costs.worker else 0.0
    waiting = waiting if waiting >= _HARDLY_WAITS else 0.0
    return costs.num_workers - beyond + math.ceil(beyond * waiting)


def _costs_of(question: Question, now: Demands, side: str) -> _Costs:
    """Return what a batch takes with these settings: the least, for ``high``, the higher rate."""
    most_is = "likely" if side == "likely" else "low"
    num_workers, num_processes = _places(question, now)
    work = now.work
    cpu, waits = work.cpu, getattr(work.waits, most_is) / question.read_speedup
    if question.cache:
        if now.stage:
            raise NotKnown("a cache is for the samples of a loader")
        hit = work.copy + _CACHE_HIT_SECONDS * work.num_fetches
        hit *= 1.0 if side == "likely" else 0.1
        cpu = (1 - work.fetch_ratio) * cpu + hit
        waits *= 1 - work.fetch_ratio
    gil = _gil(num_workers, num_processes, now, most_is) * (cpu / work.cpu if work.cpu else 1.0)
    if num_processes and not now.num_processes:
        cpu += getattr(_hand_over(now), most_is)
    handed_over = num_workers and not now.num_workers and not now.stage
    step = now.step + (getattr(_LOOP_SECONDS, most_is) if handed_over else 0.0)
    core = (cpu + now.other_cpu) / now.num_cores
    return _Costs(num_workers, cpu + waits + work.overhead, core, gil, step)


def _hand_over(now: Demands) -> Between:
    """Return the CPU seconds that a batch takes to come out of a process."""
    fixed, copies, copy = _HAND_OVER_SECONDS, _HAND_OVER_COPIES, now.work.copy
    return Between(*(each + copy * times for each, times in zip(fixed, copies, strict=True)))


def _places(question: Question, now: Demands) -> tuple[int, int]:
    """Return the number of workers and of processes."""
    num_processes, num_workers = question.processes, question.num_workers
    if num_workers is None:
        num_workers = num_processes or now.num_workers
    if num_processes is None:
        num_processes = num_workers if now.num_processes else 0
    if now.num_processes and not num_processes and num_workers:
        raise NotKnown(
            "the workers are in processes, and nothing shows how they would share the trainer's GIL"
        )
    return num_workers, num_processes


def _gil(num_workers: int, num_processes: int, now: Demands, most_is: str) -> float:
    """Return the seconds for which a batch keeps the others of its process from running."""
    if now.gil.held is None or num_processes or num_workers < 1:
        return 0.0
    held: float = getattr(now.gil.held, most_is)
    return held


def _assumption(question: Question, now: Demands) -> str:
    parts = []
    num_workers, num_processes = _places(question, now)
    if now.gil.held is None and num_workers > 1 and not num_processes:
        parts.append("the workers do not share a GIL, or release it while they work")
    elif num_processes == 0 and num_workers > now.num_workers and _may_hold_unseen(now):
        ratio = now.gil.held.likely * now.rate if now.gil.held is not None else 0.0
        parts.append(f"the GIL is held for no more than the {100 * ratio:.0f} % that were seen")
    if num_processes and not now.num_processes:
        seconds = _hand_over(now).likely
        parts.append(f"a batch comes out of a process in about {1e3 * seconds:.1f} ms")
    if question.cache:
        parts.append("all that the dataset does for a sample is in the cache")
    if question.read_speedup != 1:
        parts.append("the time in which the ops use no core is that of reading")
    return " and ".join(parts)


def _may_hold_unseen(now: Demands) -> bool:
    """Return whether calls may hold the GIL too briefly to be seen, and too often to share it."""
    return now.gil.held is not None and not now.gil.is_own and not now.gil.is_cause
