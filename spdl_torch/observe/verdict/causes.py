"""What holds training back: the stage, and the cause. Pure functions of a reading.

The thresholds that separate the causes were measured: 1 to 4 threads on 2 cores that ran pure
Python, C code without the GIL, and sleeps (see the explanation page).
"""

from __future__ import annotations

import enum
import sys
import sysconfig
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...pipeline.stats.perf_stats import PipelineStats, StageStats

__all__ = [
    "Cause",
    "Load",
    "Probes",
    "bottleneck_of",
    "cause_of",
    "could_go_without_gil",
    "has_gil",
    "is_inline",
    "lacks_gil_probe",
    "load_of",
    "may_hide_the_gil",
    "may_wait_for_gil",
    "num_delivered",
    "others_have_cores",
    "use_one_core",
]

_GIL_SHARE = 0.2
"""The wait for the GIL, in switch intervals of the interpreter, above which it is the rule (pure
Python: 1 to 4 intervals; C code without the GIL, or sleeps: 0.02)."""

_GIL_SHARE_OF_ONE_CORE = 0.05
"""The same where several threads together use no more than one core, because they take the GIL in
turns: quick ops release it before the interval is over."""

_GIL_HINT = 0.03
"""The same from which threads that are busy for no other known reason may wait for the GIL. Short
calls that take it in turns, with switches that a busy machine makes slow, are not much above the
rest (measured there: CIFAR through Pillow 0.034 to 0.05; C code without the GIL, and sleeps, 0.016
to 0.024)."""

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

_ONE_CORE = (0.7, 1.35)
"""Cores used together by threads that take the GIL in turns (measured: 1.0 to 1.25)."""

_LEAST_CORES = 0.3
"""The same where each turn begins late: a third of a core (measured: CIFAR through Pillow on a busy
machine, 2,200 samples a second with two threads and 6,900 with one)."""


class Cause(enum.Enum):
    """The cause of the training speed."""

    CONSUMER = "consumer"  # it does not wait for data
    INTERFERENCE = "interference"  # it does not wait, but loading slows its steps down
    START = "start"  # no stage is short of time: the wait is for the first batches
    SOURCE = "source"  # the source yields items too slowly
    GIL = "gil"  # threads wait for the interpreter's lock
    CPU = "cpu"  # threads wait for a core
    IO = "io"  # the op waits: storage, network, another process
    THREADS = "threads"  # the op computes, and there are cores for more of it
    UNKNOWN = "unknown"  # busy, for a reason that the probes cannot see


@dataclass(frozen=True, kw_only=True, slots=True)
class Probes:
    """The readings of the machine in a window; None = not measured."""

    gil_seconds: float | None = None
    """The median time that a thread waits for the GIL when it wakes up."""
    run_delay_ratio: float | None = None
    """Share of the loader threads' time in which they had no core, 0 to 1."""
    gc_ratio: float | None = None
    """Share of the time in which garbage was collected, 0 to 1."""
    step_slowdown: float | None = None
    """Step time over step time with cached batches, minus 1."""
    num_cores: int | None = None
    switch_interval: float = 0.005
    """``sys.getswitchinterval()``, seconds."""
    one_at_a_time: bool = False
    """Whether a loader's workers only contended for the GIL, and so run one at a time."""
    own_gil: bool = False
    """Whether no worker shares a GIL with another: each has a process, or Python has no GIL."""
    gil_held_ratio: float | None = None
    """Share of the time in which some thread held the GIL for a while (0.5 ms or more), 0 to 1."""
    cores_used: float | None = None
    """Cores in use by the training process and its workers together, on average."""
    could_go_without_gil: bool = False
    """Whether this is a free-threaded Python that runs with a GIL nevertheless."""


def has_gil() -> bool:
    """Return whether this Python runs with a GIL."""
    return bool(getattr(sys, "_is_gil_enabled", lambda: True)())


def could_go_without_gil() -> bool:
    """Return whether this is a free-threaded Python that runs with a GIL nevertheless: by
    ``PYTHON_GIL=1``, or since it imported an extension module not marked as working without one.
    """
    return bool(sysconfig.get_config_var("Py_GIL_DISABLED")) and has_gil()


def is_inline(stats: PipelineStats, pooled: Sequence[str]) -> bool:
    """Return whether a loader without workers loads, on the consumer's thread: it has no queue."""
    return bool(pooled) and all(stage.queue.elapsed == 0 for stage in stats.stages)


def num_delivered(stages: Sequence[StageStats]) -> int | None:
    """Return the number of items that the consumer got; None = unknown."""
    if not stages:
        return None
    if stages[-1].queue.elapsed > 0:
        return stages[-1].queue.num_items
    tasks = stages[0].tasks  # loaded on the consumer's own thread: there is no queue
    return tasks.num_tasks - tasks.num_failures


def bottleneck_of(stages: Sequence[StageStats]) -> StageStats | None:
    """Return the stage with the least headroom, whose threads are busy for the most time. Stages
    before it wait for room, those after it for items.
    """
    return max(stages, key=lambda stage: stage.busy_ratio, default=None)


class Load(NamedTuple):
    """The load of a stage's threads, whichever stage of their pool they work for."""

    threads: int
    busy: float
    """The share of their time inside an op."""
    cpu: float
    """CPU time over wall time inside it: a wait for the GIL may fall into any op of the pool."""

    @property
    def cores(self) -> float:
        """The number of cores that they use together."""
        return self.threads * self.busy * self.cpu

    @property
    def looks_like_gil(self) -> bool:
        """Whether several threads use about one core together."""
        return self.threads > 1 and _ONE_CORE[0] <= self.cores <= _ONE_CORE[1]


def use_one_core(stats: PipelineStats, pooled: Sequence[str] = ()) -> bool:
    """Return whether the bottleneck's threads use about one core together, as threads that take the
    GIL in turns do: what can be said without probes. Arguments as for :func:`judge`."""
    stage = bottleneck_of(stats.stages)
    return stage is not None and load_of(stage, stats.stages, pooled).looks_like_gil


def load_of(stage: StageStats, stages: Sequence[StageStats], pooled: Sequence[str]) -> Load:
    """Return the load of a stage's threads; ``pooled``: as for :func:`judge`."""
    own = [each for each in stages if each is stage or {each.name, stage.name} <= {*pooled}]
    busy = sum(each.busy_ratio for each in own)
    cpu = sum(each.busy_ratio * each.cpu_ratio for each in own) / busy if busy else 0.0
    return Load(stage.concurrency, busy, cpu)


def cause_of(load: Load, probes: Probes) -> Cause:
    """Return the reason why a stage with this load is not faster."""
    gil_share = (probes.gil_seconds or 0.0) / probes.switch_interval
    run_delay = probes.run_delay_ratio or 0.0
    least = _GIL_SHARE_OF_ONE_CORE if load.looks_like_gil else _GIL_SHARE
    if not probes.own_gil and (gil_share >= least or probes.one_at_a_time):
        return Cause.GIL
    # Threads that mostly wait for storage may find the cores taken for a moment.
    is_incidental = load.cpu < _WAITING_OP and run_delay < load.busy * (1 - load.cpu) / 2
    if run_delay >= _RUN_DELAY and not (is_incidental and not _uses_cores(load, probes)):
        return Cause.CPU
    if load.cpu < _WAITING_OP:
        # Where many threads take the GIL in turns, each computes for a small share of the time.
        return Cause.UNKNOWN if load.looks_like_gil and lacks_gil_probe(probes) else Cause.IO
    return Cause.THREADS if load.cpu >= _COMPUTING_OP else Cause.UNKNOWN


def _uses_cores(load: Load, probes: Probes) -> bool:
    """Return whether the threads use half of the cores or more."""
    return probes.num_cores is not None and load.cores >= probes.num_cores / 2


def may_wait_for_gil(load: Load, cause: Cause, probes: Probes) -> bool:
    """Return whether several threads that are busy for this cause may wait for the GIL, though it
    is not sure: they use no more than a core together, and a thread has to wait for it at times."""
    if probes.own_gil or load.threads < 2:
        return False
    if probes.gil_seconds is None:
        return may_hide_the_gil(load, cause)
    least = {Cause.UNKNOWN: _LEAST_CORES, Cause.IO: _ONE_CORE[0]}.get(cause, _ONE_CORE[1])
    is_hinted = probes.gil_seconds >= _GIL_HINT * probes.switch_interval
    return is_hinted and least <= load.cores < _ONE_CORE[1]


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
    waits = max(0.0, load.busy * (1 - load.cpu) - delay)
    return used < _TAKEN_CORES * probes.num_cores and waits < _MOSTLY_WAITING * load.busy


def lacks_gil_probe(probes: Probes) -> bool:
    """Return whether workers may share a GIL and nobody measured how long they wait for it."""
    return probes.gil_seconds is None and not probes.own_gil
