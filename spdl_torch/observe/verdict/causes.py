"""What holds training back: the stage, and the cause. Pure functions of a reading.

The thresholds that separate the causes were measured: 1 to 4 threads on 2 cores that ran pure
Python, C code without the GIL, and sleeps (see the explanation page). What holds of the GIL is in
:mod:`spdl_torch.machine.gil`.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, NamedTuple

from ...machine import gil

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...engine.statistics import PipelineStats, StageStats
    from ...machine.readings import Probes

_RUN_DELAY = 0.10
"""Share of the threads' time in which they could run and had no core (saturated: 0.2 to 0.7)."""

_TAKEN_CORES = 0.85
"""The share of the cores in use below which threads that have none wait for other programs."""
_MOSTLY_WAITING = 0.7
"""The least share of the ops' time without a core that counts as waiting for storage, whoever
has the cores."""

_WAITING_OP = 0.2
"""CPU over wall time below which an op waits for something other than a core."""

_COMPUTING_OP = 0.8

_FEW_CORES = 0.05
"""Cores in use by threads that ops start below which it does not matter whose they are."""

SHORT_SECONDS = 2.0
"""Seconds below which a window says little of causes: the probes look ten times a second, and it
includes the start."""


class Cause(enum.Enum):
    """The cause of the training speed."""

    CONSUMER = "consumer"  # it does not wait for data
    INTERFERENCE = "interference"  # it does not wait, but loading slows its steps down
    START = "start"  # no stage is short of time: the wait is for the first batches
    HAND_OVER = "hand_over"  # nor here: many results, each with a short wait of its own
    SOURCE = "source"  # the source yields items too slowly
    SAMPLER = "sampler"  # the loop draws from a loader's sampler for too long
    GIL = "gil"  # threads wait for the interpreter's lock
    CPU = "cpu"  # threads wait for a core
    IO = "io"  # the op waits: storage, network, another process
    THREADS = "threads"  # the op computes, and there are cores for more of it
    UNKNOWN = "unknown"  # busy, for a reason that the probes cannot see
    SHORT = "short"  # the window is too short to say


def is_too_short(stats: PipelineStats) -> bool:
    """Return whether a window says too little; one of no time at all is of nothing that ran."""
    return 0 < stats.elapsed < SHORT_SECONDS


def is_inline(stats: PipelineStats, pooled: Sequence[str]) -> bool:
    """Return whether a loader without workers loads, on the consumer's thread."""
    return bool(pooled) and _has_no_queue(stats.stages)


def _has_no_queue(stages: Sequence[StageStats]) -> bool:
    """Return whether nothing is handed over: the consumer's own thread runs the stages."""
    return all(stage.queue.elapsed == 0 for stage in stages)


def num_delivered(stages: Sequence[StageStats]) -> int | None:
    """Return the number of items that the consumer got; None = unknown."""
    if not stages:
        return None
    tasks = [stage.tasks for stage in stages]
    if any(each.num_failures for each in tasks) and all(
        each.num_failures == each.num_tasks for each in tasks
    ):
        return 0  # errors are handed over, too, but are no items
    if stages[-1].queue.elapsed > 0:
        return stages[-1].queue.num_items
    # Loaded on the consumer's own thread: there is no queue. Samples that are not put together, as
    # with batch_size=None, are delivered by the first stage.
    last = tasks[-1] if tasks[-1].num_tasks else tasks[0]
    return last.num_tasks - last.num_failures


def waits_for_others(stats: PipelineStats, pooled: Sequence[str]) -> float:
    """Return the share of the time in which the consumer waited for what others make: in a loader
    not for what its own thread does in it for a batch, such as drawing from the sampler. Without
    workers nobody else makes anything: it is the time that the stages take.
    """
    if stats.stages and _has_no_queue(stats.stages):
        return min(1.0, sum(stage.busy_ratio for stage in stats.stages))
    if not pooled or not stats.stages:
        return stats.consumer_wait_ratio
    queue = stats.stages[-1].queue
    return min(stats.consumer_wait_ratio, queue.get_wait_time / max(queue.elapsed, 1e-9))


def own_work(stats: PipelineStats, probes: Probes, pooled: Sequence[str]) -> float:
    """Return the share of the time that a loader itself takes of the loop's thread, beside drawing
    from the sampler."""
    others, sampling = waits_for_others(stats, pooled), probes.sampling_ratio or 0.0
    return max(0.0, stats.consumer_wait_ratio - others - sampling)


def bottleneck_of(stages: Sequence[StageStats]) -> StageStats | None:
    """Return the stage with the least headroom, whose threads are busy for the most time. Stages
    before it wait for room, those after it for items.
    """
    return max(stages, key=lambda stage: stage.busy_ratio, default=None)


def holder_of_gil(
    stage: StageStats, stages: Sequence[StageStats], pooled: Sequence[str]
) -> StageStats:
    """Return the stage with the largest CPU time, of those that share their threads with ``stage``:
    a wait for the GIL may fall into any of them, and only who computes can hold it."""
    own = _sharing(stage, stages, pooled)
    return max(own, key=lambda each: (each.busy_ratio * each.cpu_ratio, each.busy_ratio))


class Load(NamedTuple):
    """The load of a stage's threads, whichever stage of their pool they work for."""

    threads: int
    busy: float
    """The share of their time inside an op."""
    cpu: float
    """Their CPU time over wall time inside it: a wait for the GIL may fall into any op of the
    pool."""
    helpers: float | None = 0.0
    """Cores in use by threads that their ops start, such as a codec's; None = not known."""
    is_timed: bool = True
    """Whether CPU time was measured: of calls that fail it is not."""

    @property
    def cores(self) -> float:
        """The number of cores that they use together, without those of threads that ops start."""
        return self.threads * self.busy * self.cpu

    @property
    def computing(self) -> float:
        """The CPU time for a call over its wall time, with that of threads that it starts."""
        busy = self.threads * self.busy
        return self.cpu + ((self.helpers or 0.0) / busy if busy else 0.0)

    @property
    def waits(self) -> bool:
        """Whether the ops mostly wait."""
        return self.computing < _WAITING_OP

    @property
    def is_done_by_helpers(self) -> bool:
        """Whether threads that the ops start do most of the work."""
        return (self.helpers or 0.0) > self.cores

    @property
    def looks_like_gil(self) -> bool:
        """Whether several threads use about one core together."""
        return self.threads > 1 and gil.take_turns(self.cores)


def load_of(
    stage: StageStats,
    stages: Sequence[StageStats],
    pooled: Sequence[str],
    probes: Probes | None = None,
) -> Load:
    """Return the load of a stage's threads; ``pooled``: as for :func:`judge`. Without ``probes``
    nothing is known of threads that its ops start."""
    own = _sharing(stage, stages, pooled)
    busy = sum(each.busy_ratio for each in own)
    cpu = sum(each.busy_ratio * each.cpu_ratio for each in own) / busy if busy else 0.0
    is_timed = any(each.tasks.num_tasks > each.tasks.num_failures for each in own)
    load = Load(stage.concurrency, busy, cpu, None, is_timed)
    others = [each for each in stages if each not in own]
    helpers = None if probes is None else _helpers_of(load, others, probes)
    return load._replace(helpers=helpers)


def _sharing(
    stage: StageStats, stages: Sequence[StageStats], pooled: Sequence[str]
) -> list[StageStats]:
    """Return the stages that run on the threads of this one, with itself."""
    return [each for each in stages if each is stage or {each.name, stage.name} <= {*pooled}]


def _helpers_of(load: Load, others: Sequence[StageStats], probes: Probes) -> float | None:
    """Return the cores in use by threads that a load's ops start; None = not known: it was not
    measured, or they may be another stage's."""
    found = probes.helper_cores
    if found is None and probes.cores_used is not None:
        found = max(0.0, probes.cores_used - load.cores)  # at most; so this much may not matter
        return 0.0 if found < _WAITING_OP * load.threads * load.busy else None
    if found is None or found < _FEW_CORES:
        return found
    # An op that starts threads waits for them.
    waiting = max((_waiting_threads(each) for each in others), default=0.0)
    return found if waiting < load.threads * load.busy * (1 - load.cpu) / 4 else None


def _waiting_threads(stage: StageStats) -> float:
    return stage.concurrency * stage.busy_ratio * (1 - stage.cpu_ratio)


def cause_of(load: Load, probes: Probes) -> Cause:
    """Return the reason why a stage with this load is not faster."""
    run_delay = probes.run_delay_ratio or 0.0
    if not probes.own_gil and _is_gil_taken(load, probes):
        return Cause.GIL
    # Threads that mostly wait for storage may find the cores taken for a moment.
    is_incidental = load.waits and run_delay < load.busy * (1 - load.computing) / 2
    is_short_of_cores = _uses_cores(load, probes) or others_have_cores(load, probes)
    if run_delay >= _RUN_DELAY and (is_short_of_cores or not is_incidental):
        return Cause.CPU
    if not load.is_timed:
        return Cause.UNKNOWN
    if load.waits:
        return Cause.IO if _is_all_else_known(load, probes) else Cause.UNKNOWN
    return Cause.THREADS if load.computing >= _COMPUTING_OP else Cause.UNKNOWN


def _is_all_else_known(load: Load, probes: Probes) -> bool:
    """Return whether the ops of threads that wait can wait for nothing but storage or a network:
    their waits for a core and the GIL were measured, and they start no threads."""
    knows_gil = load.threads == 1 or not lacks_gil_probe(probes)
    return probes.run_delay_ratio is not None and load.helpers is not None and knows_gil


def _is_gil_taken(load: Load, probes: Probes) -> bool:
    waits = probes.gil_seconds
    if waits is None:
        return False
    return gil.is_taken(waits, probes.switch_interval, in_turns=load.looks_like_gil)


def _uses_cores(load: Load, probes: Probes) -> bool:
    """Return whether the threads use half of the cores or more."""
    used = load.cores + (load.helpers or 0.0)
    return probes.num_cores is not None and used >= probes.num_cores / 2


def may_wait_for_gil(load: Load, cause: Cause, probes: Probes) -> bool:
    """Return whether several threads that are busy for this cause may wait for the GIL, though it
    is not sure: they use no more than a core together, and a thread has to wait for it at times."""
    if probes.own_gil or load.threads < 2:
        return False
    if probes.gil_seconds is None:
        return may_hide_the_gil(load, cause)
    if cause not in (Cause.UNKNOWN, Cause.IO):
        return False
    is_hinted = gil.is_hinted(probes.gil_seconds, probes.switch_interval)
    return is_hinted and gil.take_turns(load.cores, begins_late=cause is Cause.UNKNOWN)


def may_hide_the_gil(load: Load, cause: Cause) -> bool:
    """Return whether threads may wait for the GIL though the probe sees nothing: they use about one
    core together, and neither compute nor wait for storage. CIFAR's pictures through Pillow let go
    of the GIL so often that the probe gets it at once, and two threads make fewer samples than one.
    """
    return cause is Cause.UNKNOWN and load.looks_like_gil


def others_have_cores(load: Load, probes: Probes) -> bool:
    """Return whether other programs take the cores that the threads would use; False = not
    known."""
    delay, used = probes.run_delay_ratio or 0.0, probes.cores_used
    if used is None or probes.num_cores is None or delay < _RUN_DELAY:
        return False
    waits = max(0.0, load.busy * (1 - load.computing) - delay)
    return used < _TAKEN_CORES * probes.num_cores and waits < _MOSTLY_WAITING * load.busy


def lacks_gil_probe(probes: Probes) -> bool:
    """Return whether workers may share a GIL and nobody measured how long they wait for it."""
    return probes.gil_seconds is None and not probes.own_gil
