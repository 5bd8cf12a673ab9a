"""Predictions: how many batches a second other settings would deliver at most.

A batch takes a worker, a core, the GIL and the training loop for the seconds that were measured;
the resource with the most to do for a batch limits all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ...checks import check_whole
from ...shown_text import counted, shown_rate, shown_seconds
from .causes import INPUT_BOUND, SHORT_SECONDS, Cause

if TYPE_CHECKING:
    from ...engine.statistics import StageStats
    from .causes import Reading
    from .placement import Placement

THE_LOOP = "the training loop"
THE_LOADER = "the loader's work for each batch"
"""What limits the rate where that takes most of the loop's time."""
_FEW_BATCHES = 10
_IDLE = 0.3
"""The share of their time without a job from which workers are not short of time."""
_LOOP_SECONDS = 0.07e-3
"""The least time of the loop's thread for a batch that workers make, whatever its size, which one
without workers saves: to ask for it and to take it over (measured: 0.06 ms where batches are
ready)."""
_CACHE_HIT_SECONDS = 3e-6
"""The least time of finding a sample in a cache, without copying it."""


class NotKnown(Exception):
    """Raised with the reason why the statistics give no answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """The highest rate of loading and training with other settings."""

    setting: str
    """``8 workers``"""
    base_rate: float
    """Batches a second as measured, with the present settings."""
    high: float | None = None
    """Batches a second, at most; None = it cannot be known, for the ``reason``."""
    limit: str = ""
    """The limit of the rate then: ``the training loop``, ``the sampler``, ``the cores``,
    ``the GIL``, ``the workers``, or a stage."""
    reason: str = ""
    """Why the rate cannot be known; "" = it is."""

    @property
    def gain(self) -> float | None:
        """The gain in speed, at most: 0.45 = 45 %; None = it cannot be known."""
        return None if self.high is None else self.high / self.base_rate - 1

    def __str__(self) -> str:
        """Return a sentence: ``8 workers: at most 430 batches/s, +55 %; then the training loop
        is the limit.``
        """
        if self.high is None:
            return f"{self.setting}: cannot be known: {self.reason}."
        gain = f"{100 * (self.gain or 0.0):+.0f} %"
        then = limiting(self.limit)
        return f"{self.setting}: at most {shown_rate(self.high)} batches/s, {gain}; then {then}."


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
        numbers = {"num_workers": self.num_workers, "processes": self.processes}
        check_whole("what_if", least=0, optional=True, **numbers)
        if not 0 < self.read_speedup < math.inf:
            raise ValueError(f"what_if: read_speedup must be > 0, got {self.read_speedup!r}.")
        if not str(self):
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


def worth_asking(
    reading: Reading, bottleneck: str | None, cause: Cause, placement: Placement | None
) -> list[Question]:
    """Return the questions that a report answers unasked, none where nothing can be gained."""
    if reading.waits < INPUT_BOUND or bottleneck is None:
        return []
    stage = next(stage for stage in reading.stages if stage.name == bottleneck)
    count = placement.num_workers if placement is not None else stage.concurrency
    if stage.queue.elapsed == 0 and reading.is_loader:
        count = 0
    asked = [Question(num_workers=2 * count or 2)]
    on_threads = placement is not None and not placement.num_processes
    if on_threads and cause is Cause.GIL:
        asked.append(Question(processes=max(2, count)))
    if cause is Cause.IO:
        asked.append(Question(read_speedup=2.0))
    if bottleneck in reading.pooled:
        asked.append(Question(cache=True))
    return asked


def predict(
    question: Question, reading: Reading, cause: Cause, placement: Placement | None
) -> Prediction:
    """Return what the settings would give, where ``cause`` is what holds training back now."""
    elapsed = reading.stats.elapsed
    rate = (reading.num_delivered or 0) / elapsed if elapsed else 0.0
    found = Prediction(setting=str(question), base_rate=rate)
    try:
        seconds, limit = _least_seconds(question, reading, cause, placement)
    except NotKnown as unknown:
        return replace(found, reason=str(unknown))
    return replace(found, high=1 / max(seconds, 1e-9), limit=limit)


def _least_seconds(
    question: Question, reading: Reading, cause: Cause, placement: Placement | None
) -> tuple[float, str]:
    """Return the seconds between two batches with these settings, at least, and what takes them;
    a pipeline's items count as batches. Raises: NotKnown."""
    stats, probes, inline = reading.stats, reading.probes, reading.is_inline
    num_batches = _enough_batches(reading)
    if probes.num_cores is None:
        raise NotKnown("the number of cores is unknown")
    if probes.cores_used is None:
        raise NotKnown("the CPU time of the training process was not measured")
    own = _workers_stages(reading, cause)
    _check_load(reading, cause, own)
    seconds = stats.elapsed / num_batches
    now = 0 if inline else max(1, placement.num_workers if placement else own[0].concurrency)
    are_processes = placement is not None and placement.num_processes > 0
    count, processes = question.num_workers, question.processes
    if count is None:
        count = processes or now
    on_threads = not (are_processes if processes is None else processes)
    if are_processes and on_threads and count:
        raise NotKnown(
            "the workers are in processes, and nothing shows how they would share the training "
            "process's GIL"
        )
    # The seconds of a batch in the ops: on a core, and waiting, neither for a core nor for the GIL.
    has = seconds if inline else own[0].thread_time / num_batches
    # A call that began before the window counts as a whole.
    busy = min(has, sum(stage.tasks.busy_time for stage in own) / num_batches)
    cpu = sum(stage.tasks.ave_cpu_time * stage.tasks.num_tasks for stage in own) / num_batches
    cpu = min(busy, cpu)
    other_cpu = max(0.0, min(probes.cores_used, probes.num_cores) * seconds - cpu)
    waits = overhead = gil = 0.0
    own_work = reading.own_work
    if cause is Cause.GIL:
        gil = seconds
    else:
        waits = max(0.0, busy - cpu - reading.run_delay * has)
        if reading.is_loader and not inline:  # it takes jobs, and hands batches on
            idle = own[0].wait_in_ratio + own[0].wait_out_ratio
            overhead = max(0.0, has * (1 - idle) - busy)
        if not inline and not probes.own_gil:
            gil = (probes.gil_held_ratio or 0.0) * seconds
    if question.cache:
        if not reading.is_loader:
            raise NotKnown("a cache is for the samples of a loader")
        fetches = own[0].tasks
        rest = max(0.0, 1 - fetches.busy_time / max(1e-12, num_batches * busy))
        hits = min(_CACHE_HIT_SECONDS * fetches.num_tasks, fetches.busy_time) / num_batches
        cpu, waits, gil = rest * cpu + hits, rest * waits, rest * gil
        # Beside the stages, what is not of each batch, such as the start, may be the most of it.
        overhead = other_cpu = 0.0
        own_work = min(own_work, 0.0 if inline else _LOOP_SECONDS / seconds)
    worker = cpu + waits / question.read_speedup + overhead
    # What the loop does itself in the loader, such as to draw from the sampler, is its work.
    step = (1 - reading.waits_for_others - reading.own_work + own_work) * seconds
    shares = {THE_LOOP: 1 - reading.waits, "the sampler": reading.sampling}
    shares[THE_LOADER] = own_work
    loop = max(shares, key=lambda name: shares[name])
    if not count:
        return worker + step, loop
    takes = [
        (step + (_LOOP_SECONDS if inline else 0.0), loop),
        (worker / count, "the workers" if reading.is_loader else f"stage {own[0].name!r}"),
        ((cpu + other_cpu) / probes.num_cores, "the cores"),
        (gil if on_threads else 0.0, "the GIL"),
    ]
    takes += [(s.busy_ratio * seconds, f"stage {s.name!r}") for s in stats.stages if s not in own]
    return max(takes)


def _enough_batches(reading: Reading) -> int:
    num_batches = reading.num_delivered or 0
    if not num_batches:
        raise NotKnown("nothing was delivered")
    if reading.stats.elapsed < SHORT_SECONDS:
        raise NotKnown(f"the window is short, {shown_seconds(reading.stats.elapsed)}")
    if num_batches < _FEW_BATCHES:
        raise NotKnown(f"only {num_batches} batches were delivered")
    return num_batches


def _workers_stages(reading: Reading, cause: Cause) -> list[StageStats]:
    """Return the stages of a loader's workers, or the busiest one of a pipeline."""
    stages = reading.stages
    is_short_of_time = reading.is_loader and stages and stages[0].wait_in_ratio < _IDLE
    if cause is Cause.START and not is_short_of_time:
        raise NotKnown("the wait is the start of the pass, and no worker is short of time")
    if cause is Cause.HAND_OVER and not is_short_of_time:
        raise NotKnown("batches wait to be handed over, and no worker is short of time")
    if cause is Cause.SOURCE:
        raise NotKnown("every stage waits for the source, whose time is not measured")
    if reading.is_loader:
        return [stage for stage in stages if stage.name in reading.pooled]
    return [reading.busiest]


def _check_load(reading: Reading, cause: Cause, own: Sequence[StageStats]) -> None:
    """Raise where the workers take what no figure shows."""
    load = reading.load_of(max(own, key=lambda stage: stage.busy_ratio))
    if cause in (Cause.UNKNOWN, Cause.IO) and reading.may_take_turns(load, cause is Cause.IO):
        raise NotKnown("the workers may wait for the GIL, and the figures do not show for how long")
    if reading.leaves_cores_to_others(load):
        probes = reading.probes
        raise NotKnown(
            f"the workers had no core for {100 * reading.run_delay:.0f} % of their time, though "
            f"this training used {probes.cores_used:.1f} of {probes.num_cores:g}: other programs "
            "took them"
        )
    if load.is_done_by_helpers:
        raise NotKnown("calls start threads of their own, whose part of a batch is not known")
