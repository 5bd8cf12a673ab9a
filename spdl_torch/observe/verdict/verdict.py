"""The verdict: what holds training back, why, and what to do. A pure function of a reading.

Thresholds on the waiting time are those of TensorFlow's input-pipeline analysis (5 and 20 % of the
step). Those that separate the causes were measured: 1 to 4 threads on 2 cores that ran pure Python,
C code without the GIL, and sleeps (see the explanation page).
"""

from __future__ import annotations

import enum
import math
import sys
import sysconfig
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...pipeline.stats.perf_stats import PipelineStats, StageStats

__all__ = [
    "Cause",
    "Probes",
    "Verdict",
    "could_go_without_gil",
    "has_gil",
    "is_inline",
    "judge",
    "num_delivered",
    "use_one_core",
]

_INPUT_BOUND = 0.05
_HIGHLY_INPUT_BOUND = 0.20

_BUSY = 0.5
"""The share of busy time below which a stage does not hold the others back."""

_GIL_SHARE = 0.2
"""The wait for the GIL, in switch intervals of the interpreter, above which it is the rule (pure
Python: 1 to 4 intervals; C code without the GIL, or sleeps: 0.02)."""

_GIL_SHARE_OF_ONE_CORE = 0.05
"""The same where several threads together use no more than one core, because they take the GIL in
turns: quick ops release it before the interval is over."""

_RUN_DELAY = 0.10
"""Share of the threads' time in which they could run and had no core (saturated: 0.2 to 0.7)."""

_WAITING_OP = 0.2
"""CPU over wall time below which an op waits for something other than a core."""

_COMPUTING_OP = 0.8

_IDLE_CONSUMER = 0.95
"""Share of waiting above which the consumer works too little to predict its speed."""

_MOST_AT_ONCE = 4
"""Factor of concurrency beyond which a stage may behave differently: measure again there."""

_ONE_CORE = (0.7, 1.35)
"""Cores used together by threads that take the GIL in turns (measured: 1.0 to 1.25)."""

_SHORT_SECONDS = 1.0
"""Seconds below which a window says little: the probes look ten times a second, and the window
includes the start.
"""

_STEP_SLOWDOWN = 0.10
_FAILURES = 0.05


class Cause(enum.Enum):
    """The cause of the training speed."""

    CONSUMER = "consumer"  # it does not wait for data
    INTERFERENCE = "interference"  # it does not wait, but loading slows its steps
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
    """Whether this Python is a free-threaded one that runs with a GIL nevertheless."""


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
    """The gain in speed if the action removes the wait, at most: 0.45 = 45 %; infinite
    where nothing else limits it."""
    remarks: tuple[str, ...] = ()
    """Further findings: failures, dropped items, pauses."""


def judge(
    stats: PipelineStats, probes: Probes | None = None, *, pooled: Sequence[str] = ()
) -> Verdict:
    """Name what holds training back.

    stats: the figures of a window without the warm-up.
    probes: without them the cause is inferred from CPU time alone, less surely.
    pooled: stages that share threads, those of a loader's workers, which wait for the trainer's
        requests, not for a source; () = every stage has threads of its own, as in a pipeline.
    """
    probes = probes or Probes(switch_interval=sys.getswitchinterval(), own_gil=not has_gil())
    waiting = stats.consumer_wait_ratio
    remarks = tuple(_remarks(stats, probes))
    has_nothing = num_delivered(stats.stages) == 0
    if waiting < _INPUT_BOUND:
        if has_nothing:
            return _nothing_delivered(stats, remarks)
        return _not_input_bound(waiting, probes, remarks)
    level = "HIGHLY" if waiting >= _HIGHLY_INPUT_BOUND else "moderately"
    finding = f"Training waits for data {_percent(waiting)} of the time ({level} input-bound)"
    if has_nothing:
        finding = f"Nothing was delivered. {finding}"
    stage = _bottleneck(stats.stages)
    gain = 1 / (1 - waiting) - 1 if waiting < _IDLE_CONSUMER else math.inf
    load = None if stage is None else _load(stage, stats.stages, pooled)
    # A loader's workers may be without a core beside their ops, too.
    no_core = probes.run_delay_ratio or 0.0 if stage and stage.name in pooled else 0.0
    if stage is None or load is None or load.busy + no_core < _BUSY:
        cause, why, action = _no_busy_stage(stats.stages, pooled)
        stage = None
    else:
        cause = _cause(load, probes)
        gain = min(gain, _headroom_without(stats.stages, stage, pooled))
        why = f"stage {stage.name!r} is the bottleneck{_WHY[cause]}"
        knob = "num_workers" if stage.name in pooled else "its concurrency"
        if is_inline(stats, pooled):
            load = load._replace(threads=0)
        action = _action(load, cause, gain, probes, knob)
    return Verdict(
        cause=cause,
        stage=stage.name if stage else None,
        wait_ratio=waiting,
        finding=f"{finding}: {why}.",
        action=action,
        gain=gain,
        remarks=remarks,
    )


def has_gil() -> bool:
    """Return whether this Python runs with a GIL."""
    return bool(getattr(sys, "_is_gil_enabled", lambda: True)())


def could_go_without_gil() -> bool:
    """Return whether this Python is a free-threaded one that runs with a GIL nevertheless: by
    ``PYTHON_GIL=1``, or since it imported an extension module that does not say that it needs none.
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


def _nothing_delivered(stats: PipelineStats, remarks: tuple[str, ...]) -> Verdict:
    num_tasks = sum(stage.tasks.num_tasks for stage in stats.stages)
    why = "every item failed or was dropped" if num_tasks else "no stage was given any item"
    action = "See the notes" if remarks else "Look at the source"
    return Verdict(
        cause=Cause.UNKNOWN,
        stage=None,
        wait_ratio=stats.consumer_wait_ratio,
        finding=f"Nothing was delivered in {stats.elapsed:.2g} s: {why}.",
        action=f"{action}, and at the log of spdl_torch for the first errors.",
        gain=0.0,
        remarks=remarks,
    )


def _not_input_bound(waiting: float, probes: Probes, remarks: tuple[str, ...]) -> Verdict:
    slowdown = probes.step_slowdown or 0.0
    finding = f"Training is not input-bound: it waits for data {_percent(waiting)} of the time"
    cause, action = Cause.CONSUMER, "Do nothing: a faster loader would not be noticed."
    if slowdown >= _STEP_SLOWDOWN:
        cause = Cause.INTERFERENCE
        finding += f", but its steps take {_percent(slowdown)} longer than with cached batches"
        action = "Use fewer threads, or ops that hold the GIL less (whole batches in one call)."
        if probes.own_gil:
            action = "Use fewer workers: they take cores, or memory bandwidth, from the step."
    gain = slowdown if cause is Cause.INTERFERENCE else 0.0
    return Verdict(
        cause=cause,
        stage=None,
        wait_ratio=waiting,
        finding=f"{finding}.",
        action=action,
        gain=gain,
        remarks=remarks,
    )


def _bottleneck(stages: Sequence[StageStats]) -> StageStats | None:
    """Return the stage with the least headroom, whose threads are busy for the most time. Stages
    before it wait for room, those after it for items.
    """
    return max(stages, key=lambda stage: stage.busy_ratio, default=None)


class _Load(NamedTuple):
    """The load of a stage's threads, whichever stage of their pool they work for."""

    threads: int
    busy: float
    """The share of their time inside an op."""
    cpu: float
    """CPU time over wall time there: a wait for the GIL may fall into any op of the pool."""

    @property
    def cores(self) -> float:
        """The number of cores that they use together."""
        return self.threads * self.busy * self.cpu

    @property
    def looks_like_gil(self) -> bool:
        return self.threads > 1 and _ONE_CORE[0] <= self.cores <= _ONE_CORE[1]


def use_one_core(stats: PipelineStats, pooled: Sequence[str] = ()) -> bool:
    """Return whether the threads of the bottleneck use about one core together, as threads do that
    take the GIL in turns: what can be said without probes. Arguments as for :func:`judge`."""
    stage = _bottleneck(stats.stages)
    return stage is not None and _load(stage, stats.stages, pooled).looks_like_gil


def _load(stage: StageStats, stages: Sequence[StageStats], pooled: Sequence[str]) -> _Load:
    own = [each for each in stages if each is stage or {each.name, stage.name} <= {*pooled}]
    busy = sum(each.busy_ratio for each in own)
    cpu = sum(each.busy_ratio * each.cpu_ratio for each in own) / busy if busy else 0.0
    return _Load(stage.concurrency, busy, cpu)


def _no_busy_stage(stages: Sequence[StageStats], pooled: Sequence[str]) -> tuple[Cause, str, str]:
    if not pooled and stages and stages[0].wait_in_ratio >= _BUSY:
        return (
            Cause.SOURCE,
            "the source is the bottleneck; every stage waits for it",
            "Make the source cheaper: let it yield paths or indices, and read in a stage.",
        )
    return (
        Cause.START,
        "no stage is short of threads; the wait is the start of the pass",
        "Use longer epochs or persistent_workers=True.",
    )


_WHY = {
    Cause.GIL: ", and its threads wait for the GIL",
    Cause.CPU: ", and its threads wait for a core",
    Cause.IO: ", and it waits for storage or a network",
    Cause.THREADS: ", and it computes all the time",
    Cause.UNKNOWN: "",
}


def _cause(load: _Load, probes: Probes) -> Cause:
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
        # Of many threads that take the GIL in turns, each computes a small share of the time.
        return Cause.UNKNOWN if load.looks_like_gil and _lacks_gil_probe(probes) else Cause.IO
    return Cause.THREADS if load.cpu >= _COMPUTING_OP else Cause.UNKNOWN


def _uses_cores(load: _Load, probes: Probes) -> bool:
    """Return whether the threads use half of the cores or more."""
    return probes.num_cores is not None and load.cores >= probes.num_cores / 2


def _lacks_gil_probe(probes: Probes) -> bool:
    """Return whether workers may share a GIL, and nobody looked at how long they wait for it."""
    return probes.gil_seconds is None and not probes.own_gil


def _action(load: _Load, cause: Cause, gain: float, probes: Probes, knob: str) -> str:
    wanted = math.ceil(max(1, load.threads) * min(1 + gain, _MOST_AT_ONCE))
    useful = math.inf  # threads that wait for storage use no core
    if cause is not Cause.IO and probes.num_cores is not None:
        useful = max(probes.num_cores, math.ceil(probes.num_cores / max(0.01, load.cpu)))
    more = f"from {load.threads} to about {min(wanted, useful)}"
    match cause:
        case Cause.GIL:
            advice = f"More threads will not help. {_without_gil(knob)}"
            return f"{advice} {_SWITCH_OFF}" if probes.could_go_without_gil else advice
        case _ if probes.one_at_a_time:
            return "More threads will not help: one at a time is faster than several together."
        case Cause.UNKNOWN if _lacks_gil_probe(probes) and load.looks_like_gil:
            return (
                f"Its {load.threads} threads use {load.cores:.1f} cores together, as threads do "
                "that take the GIL in turns; then more will not help. "
                f"{_without_gil(knob)} Load for a few seconds to be sure."
            )
        case Cause.THREADS | Cause.UNKNOWN if load.threads >= useful:
            return (
                f"More threads will not help: they compute on all of the {probes.num_cores} cores "
                "already. Give it less work for each item, or more cores."
            )
        case Cause.CPU:
            return "More threads will not help. Give it more cores, or less work for each item."
        case Cause.IO:
            return f"Raise {knob} {more}: its threads use no core while they wait."
        case Cause.THREADS if probes.num_cores is not None and wanted > probes.num_cores:
            return (
                f"Raise {knob} {more}{_unless_gil(probes, knob)}: that keeps the "
                f"{probes.num_cores} cores busy. For more, give it less work for each item."
            )
        case _:
            return f"Raise {knob} {more}, as long as cores are idle{_unless_gil(probes, knob)}."


_SWITCH_OFF = (
    "This Python can run without its GIL, which an extension module or PYTHON_GIL=1 has switched "
    "on: with PYTHON_GIL=0 it stays off."
)


def _unless_gil(probes: Probes, knob: str) -> str:
    """Return the condition on the advice to add threads where nobody looked at the GIL."""
    if not _lacks_gil_probe(probes):
        return ""
    elsewhere = "in processes" if knob == "num_workers" else "on a process pool (executor=)"
    return f", {elsewhere} if the work holds the GIL"


def _without_gil(knob: str) -> str:
    of_its_own = (
        'in processes (isolation="process", processes=num_workers)'
        if knob == "num_workers"
        else "on a process pool (executor=)"
    )
    return (
        "Do its work in few calls that release the GIL, best a batch at a time, or run it "
        f"{of_its_own}."
    )


def _headroom_without(
    stages: Sequence[StageStats], fixed: StageStats, pooled: Sequence[str]
) -> float:
    """Return how much faster the other stages could run, as a share of the present rate."""
    changed = pooled if fixed.name in pooled else (fixed.name,)
    others = [stage.busy_ratio for stage in stages if stage.name not in changed]
    return 1 / max(*others, 0.01) - 1 if others else math.inf


def _remarks(stats: PipelineStats, probes: Probes) -> list[str]:
    remarks = []
    if 0 < stats.elapsed < _SHORT_SECONDS:
        remarks.append(
            f"The window is short, {stats.elapsed:.2g} s: look again after some more loading."
        )
    for stage in stats.stages:
        tasks = stage.tasks
        if tasks.num_failures:
            share = tasks.num_failures / tasks.num_tasks
            grave = ", more than the 5 % that should concern you" if share > _FAILURES else ""
            remarks.append(
                f"{stage.name}: {tasks.num_failures} of {tasks.num_tasks} tasks failed and their "
                f"items were dropped ({_percent(share)}{grave})."
            )
        if stage.num_dropped:
            remarks.append(f"{stage.name}: the op dropped {stage.num_dropped} items (None).")
    if (probes.gc_ratio or 0.0) >= 0.01:
        remarks.append(
            f"Garbage collection takes {_percent(probes.gc_ratio or 0.0)} of the time: call "
            "gc.freeze() before training."
        )
    return remarks


def _percent(ratio: float) -> str:
    return f"{100 * ratio:.1f} %" if ratio < 0.1 else f"{100 * ratio:.0f} %"
