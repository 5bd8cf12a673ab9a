"""Predictions: how many batches a second other settings would deliver at most.

A model with few parts: a batch takes a worker, a core, the GIL and the trainer for the seconds that
were measured, and the busiest resource limits all. The bound covers the error of measurement, and
causes that the statistics do not separate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ...checks import check_whole
from ...shown_text import counted, shown_rate, shown_seconds
from .causes import INPUT_BOUND, SHORT_SECONDS, Cause

if TYPE_CHECKING:
    from ...engine.statistics import StageStats, TaskPerfStats
    from .causes import Reading
    from .placement import Placement

THE_LOADER = "the loader's work for each batch"
"""What limits the rate where that takes most of the loop's time."""
_FEW_BATCHES = 10
_PROBES_PER_SECOND = 10
_MODEL_ERROR = 0.05
_IDLE = 0.3
"""The share of their time without a job from which workers are not short of time."""
_OTHERWISE = 1.25
"""The factor between the measured and the computed rate of the present settings above which the
model is missing something."""
_MOSTLY_STEADY = 0.7
"""The weight of the rate for times that do not vary, against that for random ones."""
_HARDLY_WAITS = 0.1
"""The share of a worker's time without a core below which another one finds no gaps to fill."""
_CACHE_HIT_SECONDS = 30e-6
"""The time of finding a sample in a cache, without copying it."""


class NotKnown(Exception):
    """Raised with the reason why the statistics give no answer."""


class Between(NamedTuple):
    """Seconds of a batch: the least, for the highest rate, and those to expect."""

    low: float
    likely: float

    def at(self, most: bool) -> float:
        """Return the seconds for the highest rate, or for the rate to expect."""
        return self.low if most else self.likely


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


def predict(
    question: Question, reading: Reading, cause: Cause, placement: Placement | None
) -> Prediction:
    """Return what the settings would give, where ``cause`` is what holds training back now."""
    found: dict[str, Any] = {"base_rate": 0.0}
    try:
        now = demands_of(reading, cause, placement)
        found["base_rate"] = now.rate
        answer = estimate(question, now)
        found |= {"high": answer.high, "limit": answer.limit}
        found["assumption"] = _assumption(question, now)
    except NotKnown as unknown:
        found["reason"] = str(unknown)
    return Prediction(setting=str(question), **found)


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Demands:
    """The seconds that one batch takes of every resource; a pipeline's items count as batches."""

    rate: float
    """Batches a second that were delivered."""
    num_workers: int
    """0 = the trainer's own thread loads."""
    num_processes: int
    """0 = the workers are threads of the training process."""
    cpu: float
    """CPU seconds in the workers' ops."""
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
    other_cpu: float
    """CPU seconds of everything outside the workers' ops, the trainer included."""
    held: Between | None
    """Seconds for which one batch holds a GIL that the workers share; None = not measured."""
    may_hold_unseen: bool
    """Whether calls may hold it too briefly to be seen, and too often to share it."""
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


def demands_of(reading: Reading, cause: Cause, placement: Placement | None) -> Demands:
    """Return what a batch takes. Raises: NotKnown."""
    stats, probes, inline = reading.stats, reading.probes, reading.is_inline
    num_batches = _enough_batches(reading)
    if probes.num_cores is None:
        raise NotKnown("the number of cores is unknown")
    if probes.cores_used is None:
        raise NotKnown("the CPU time of the training process was not measured")
    own = _workers_stages(reading, cause)
    _check_load(reading, cause, own)
    seconds = stats.elapsed / num_batches
    num_workers = placement.num_workers if placement else own[0].concurrency
    num_workers = 0 if inline else max(1, num_workers)
    tasks = [stage.tasks for stage in own]
    busy = sum(each.busy_time for each in tasks) / num_batches
    cpu = min(busy, sum(each.ave_cpu_time * each.num_tasks for each in tasks) / num_batches)
    is_gil_bound = cause is Cause.GIL
    has = seconds if inline else own[0].thread_time / num_batches
    waits = busy - cpu
    waits -= min(waits, reading.run_delay * has)
    held, most_held = None, 0.0
    if not inline:
        held, most_held = _gil_seconds(reading, seconds, num_workers, is_gil_bound)
    has_other_work = reading.is_loader and not inline and not is_gil_bound
    idle = own[0].wait_in_ratio + own[0].wait_out_ratio
    shares = {"the trainer": 1 - reading.waits, "the sampler": reading.sampling}
    shares[THE_LOADER] = reading.own_work
    return Demands(
        rate=num_batches / stats.elapsed,
        num_workers=num_workers,
        num_processes=placement.num_processes if placement else 0,
        cpu=cpu,
        waits=_waits(reading, waits, most_held, num_workers, is_gil_bound),
        overhead=max(0.0, has * (1 - idle) - busy) if has_other_work else 0.0,
        fetch_ratio=tasks[0].busy_time / max(1e-12, num_batches * busy),
        copy=sum(each.busy_time for each in tasks[1:]) / num_batches,
        num_fetches=tasks[0].num_tasks / num_batches,
        other_cpu=max(0.0, probes.cores_used * seconds - cpu),
        held=held,
        may_hold_unseen=held is not None and not probes.own_gil and not is_gil_bound,
        # What the loop does itself in the loader, such as to draw from the sampler, is its work.
        step=(1 - reading.waits_for_others) * seconds,
        loop=max(shares, key=lambda name: shares[name]),
        stages=tuple(
            (stage.name, stage.busy_ratio * seconds)
            for stage in stats.stages
            if stage not in own and stage.busy_ratio > 0
        ),
        num_cores=probes.num_cores,
        error=_MODEL_ERROR + _sampling_error(tasks[0]),
        stage="" if reading.is_loader else own[0].name,
    )


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


def _gil_seconds(
    reading: Reading, seconds: float, num_workers: int, is_gil_bound: bool
) -> tuple[Between | None, float]:
    """Return the seconds per batch in which the GIL is held, as far as the probe saw, and the most
    that it may be: it does not see holds of less than half a millisecond.
    """
    if reading.probes.own_gil:
        return Between(0.0, 0.0), 0.0
    held = reading.probes.gil_held_ratio
    if is_gil_bound:  # one worker may share the GIL with the trainer, and for less of the time
        least = 0.85 if num_workers > 1 or held is None else min(0.85, held)
        return Between(least * seconds, seconds), seconds
    if held is None:
        return None, 0.0
    num_probes = max(1.0, _PROBES_PER_SECOND * reading.stats.elapsed)
    spread = 2 * (held * (1 - held) / num_probes) ** 0.5
    most = min(1.0, held + spread) * seconds
    return Between(max(0.0, held - spread) * seconds, held * seconds), most


def _waits(
    reading: Reading, rest: float, most_held: float, num_workers: int, is_gil_bound: bool
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
    meetings = min(rest, (num_workers - 1) * most_held) * (reading.probes.gil_held_ratio or 0.0)
    return Between(rest - meetings, rest - meetings / 2)


def _sampling_error(tasks: TaskPerfStats) -> float:
    """Return twice the relative standard error of the mean time of a call."""
    if tasks.ave_time <= 0 or tasks.num_tasks < 1:
        return 0.0
    deviation = max(0.0, tasks.p90_time - tasks.p50_time) / 1.28
    return float(2 * deviation / tasks.ave_time / tasks.num_tasks**0.5)


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
    rate, limit = _rate(_costs_of(question, now, False), now, False, _as_computed(now, False))
    high, _ = _rate(_costs_of(question, now, True), now, True, _as_computed(now, True))
    return Estimate(now.rate, rate, max(high, rate) * (1 + now.error), limit)


class _Costs(NamedTuple):
    """The workers, and the seconds that a batch takes of one, of the cores, of the GIL and of the
    loop."""

    num_workers: int
    worker: float
    core: float
    """The CPU time of a batch, divided by the number of cores."""
    gil: float
    step: float


def _as_computed(now: Demands, most: bool) -> float:
    """Return the measured rate of the present settings over the computed one. Raises: NotKnown."""
    computed, _ = _rate(_costs_of(Question(num_workers=now.num_workers), now, most), now, most)
    # If the model does not know what limits the present settings, it knows little about others.
    if not most and not 1 / _OTHERWISE <= now.rate / computed <= _OTHERWISE:
        raise NotKnown(
            f"{shown_rate(computed)} batches/s would be expected of the present settings, and "
            f"{shown_rate(now.rate)} were measured, so something else counts: the workers' start, "
            "or other programs"
        )
    return min(_OTHERWISE, max(1 / _OTHERWISE, now.rate / computed))


def _rate(costs: _Costs, now: Demands, most: bool, as_computed: float = 1.0) -> tuple[float, str]:
    """Return the batches a second, and what limits them: the highest, or those to expect."""
    if not costs.num_workers:
        return as_computed / (costs.worker + costs.step), now.loop
    shared = max(costs.core, costs.gil)
    elsewhere = max(0.0, costs.worker - shared)
    useful = _at_odds(costs, now)
    if shared <= 0:  # nobody waits for anybody
        number = costs.num_workers if most else useful
        workers = number / elsewhere if elsewhere > 0 else math.inf
    elif most:
        workers = _steady_rate(costs.num_workers, shared, elsewhere)
    else:
        workers = _MOSTLY_STEADY * _steady_rate(useful, shared, elsewhere)
        workers += (1 - _MOSTLY_STEADY) * _random_rate(useful, shared, elsewhere)
    name = f"stage {now.stage!r}" if now.stage else "the workers"
    if costs.num_workers * shared > costs.worker:
        name = "the GIL" if costs.gil > costs.core else "the cores"
    limits = [(as_computed * workers, name)]
    limits += [(1 / seconds, f"stage {stage!r}") for stage, seconds in now.stages]
    if costs.step > 0:
        limits.append((1 / costs.step, now.loop))
    return min(limits)


# Workers are the customers of a closed queueing network: they cycle between one server, the
# resource that they share, and the rest of a batch's time, which passes without it.


def _steady_rate(num_customers: int, service: float, think: float) -> float:
    """Return the cycles a second of customers that wait for each other only if they must, since
    times do not vary. ``service``, ``think``: seconds at the server and elsewhere, in a cycle."""
    return min(num_customers / (service + think), 1 / service)


def _random_rate(num_customers: int, service: float, think: float) -> float:
    """Return the cycles a second if times are random: by mean value analysis, exact for exponential
    ones."""
    waiting = rate = 0.0
    for number in range(1, num_customers + 1):
        at_server = service * (1 + waiting)
        rate = number / (at_server + think)
        waiting = rate * at_server
    return rate


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


def _costs_of(question: Question, now: Demands, most: bool) -> _Costs:
    """Return what a batch takes with these settings, for the highest rate or the one to expect."""
    num_workers, num_processes = _places(question, now)
    cpu, waits = now.cpu, now.waits.at(most) / question.read_speedup
    if question.cache:
        if now.stage:
            raise NotKnown("a cache is for the samples of a loader")
        hit = now.copy + _CACHE_HIT_SECONDS * now.num_fetches
        cpu = (1 - now.fetch_ratio) * cpu + hit * (0.1 if most else 1.0)
        waits *= 1 - now.fetch_ratio
    gil = 0.0
    if now.held is not None and num_workers and not num_processes:
        gil = now.held.at(most) * (cpu / now.cpu if now.cpu else 1.0)
    if num_processes and not now.num_processes:
        cpu += _hand_over(now, most)
    is_handed_over = num_workers and not now.num_workers and not now.stage
    step = now.step + (_LOOP_SECONDS.at(most) if is_handed_over else 0.0)
    core = (cpu + now.other_cpu) / now.num_cores
    return _Costs(num_workers, cpu + waits + now.overhead, core, gil, step)


def _hand_over(now: Demands, most: bool) -> float:
    """Return the CPU seconds that a batch takes to come out of a process."""
    return _HAND_OVER_SECONDS.at(most) + now.copy * _HAND_OVER_COPIES.at(most)


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


def _assumption(question: Question, now: Demands) -> str:
    parts = []
    num_workers, num_processes = _places(question, now)
    if now.held is None and num_workers > 1 and not num_processes:
        parts.append("the workers do not share a GIL, or release it while they work")
    elif num_processes == 0 and num_workers > now.num_workers and now.may_hold_unseen:
        ratio = now.held.likely * now.rate if now.held is not None else 0.0
        parts.append(f"the GIL is held for no more than the {100 * ratio:.0f} % that were seen")
    if num_processes and not now.num_processes:
        milliseconds = 1e3 * _hand_over(now, False)
        parts.append(f"a batch comes out of a process in about {milliseconds:.1f} ms")
    if question.cache:
        parts.append("all that the dataset does for a sample is in the cache")
    if question.read_speedup != 1:
        parts.append("the time in which the ops use no core is that of reading")
    return " and ".join(parts)
