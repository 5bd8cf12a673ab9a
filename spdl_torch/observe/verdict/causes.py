"""What a window is: its statistics, the probes meanwhile, and whether it is a loader's. Each
question about it has one property. What it may show: the causes.

The thresholds were measured: 1 to 4 threads on 2 cores that ran pure Python, C code without the
GIL, and sleeps (see the explanation page). What holds of the GIL is in
:mod:`spdl_torch.machine.readings`.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from ...machine.readings import Probes, is_hinted, is_taken, take_turns

if TYPE_CHECKING:
    from ...engine.statistics import PipelineStats, StageStats


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
    DOWNLOAD = "download"  # the op, or the source, waits for shards that are not there yet
    THREADS = "threads"  # the op computes, and there are cores for more of it
    UNKNOWN = "unknown"  # busy, for a reason that the probes cannot see
    SHORT = "short"  # the window is too short to say


INPUT_BOUND = 0.05
"""The share of waiting from which training is input-bound; TensorFlow's threshold."""

SHORT_SECONDS = 2.0
"""Seconds below which a window says little of causes: the probes look ten times a second, and it
includes the start."""

RUN_DELAY = 0.10
"""Share of the threads' time in which they could run and had no core (saturated: 0.2 to 0.7)."""
_TAKEN_CORES = 0.85
"""The share of the cores in use below which threads that have none wait for other programs."""
_MOSTLY_WAITING = 0.5
"""The least share of the ops' time without a core that counts as waiting for storage, whoever
has the cores."""
_WAITING_OP = 0.2
"""CPU over wall time below which an op waits for something other than a core."""
COMPUTING_OP = 0.8
_FEW_CORES = 0.05
"""Cores in use by threads that ops start below which it does not matter whose they are."""
_WAITED_FOR = 0.25
"""An op that starts threads waits for them: the least that others wait, as a share of its own
waits, from which the threads may be theirs."""
BUSY = 0.5
"""The share of busy time below which a stage does not hold back the others."""
_IDLE = 0.1
"""The share of busy time below which a stage has no part in what its workers wait for."""
_MOSTLY = 0.5
"""The share of the waits from which the sampler, the loader itself or downloads of shards are named
for them."""
_MANY_ITEMS = 1000
_HANDED_OVER_SECONDS = 5e-4
"""The mean wait up to which waking the threads that hand an item over may be all of it: 0.03 to
0.1 ms between threads, 0.2 to 0.4 ms from a process (measured), on busy cores."""


class Load(NamedTuple):
    """The load of a stage's threads, whichever stage of their pool they work for."""

    threads: int
    busy: float
    """The share of their time inside an op."""
    cpu: float
    """Their CPU time over wall time inside it: a wait for the GIL may fall into any op of the
    pool."""
    helpers: float | None = None
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
        return self.threads > 1 and take_turns(self.cores)


def num_delivered(stages: Sequence[StageStats]) -> int | None:
    """Return the number of items that the consumer got; None = unknown."""
    if not stages:
        return None
    failed = [stage.tasks.num_failures for stage in stages]
    if any(failed) and failed == [stage.tasks.num_tasks for stage in stages]:
        return 0  # errors are handed over, too, but are no items
    return stages[-1].num_items


@dataclass(frozen=True)
class Reading:
    """A window without the warm-up."""

    stats: PipelineStats
    probes: Probes
    pooled: Sequence[str] = ()
    """The stages that share the threads of a loader's workers; () = it is a pipeline's."""

    # -- whose it is ------------------------------------------------------------------------------

    @property
    def stages(self) -> Sequence[StageStats]:
        """In order."""
        return self.stats.stages

    @property
    def is_loader(self) -> bool:
        """Whether it is a loader's, whose workers wait for the trainer's requests."""
        return bool(self.pooled)

    @cached_property
    def is_inline(self) -> bool:
        """Whether a loader without workers loads, on the consumer's thread."""
        return self.is_loader and self._has_no_queue

    @cached_property
    def _has_no_queue(self) -> bool:
        return all(stage.queue.elapsed == 0 for stage in self.stages)

    # -- the consumer -----------------------------------------------------------------------------

    @property
    def is_too_short(self) -> bool:
        """Whether it says too little; one of no time at all is of nothing that ran."""
        return 0 < self.stats.elapsed < SHORT_SECONDS

    @cached_property
    def num_delivered(self) -> int | None:
        """The number of items that the consumer got; None = unknown."""
        return num_delivered(self.stages)

    @property
    def num_lost(self) -> int:
        """The number of calls that failed or dropped their item."""
        return sum(stage.tasks.num_failures + stage.num_dropped for stage in self.stages)

    @property
    def lacks_statistics(self) -> bool:
        """Whether its stages count nothing."""
        is_counted = any(stage.tasks.num_tasks for stage in self.stages)
        return bool(self.stages) and not is_counted and bool(self.num_delivered)

    @property
    def waits(self) -> float:
        """The share of the time in which the consumer was in ``next()``."""
        return self.stats.consumer_wait_ratio

    @property
    def sampling(self) -> float:
        """The part of it in which the loop drew from a loader's sampler."""
        return self.probes.sampling_ratio or 0.0

    @cached_property
    def waits_for_others(self) -> float:
        """The part of it in which the consumer waited for what others make. Without workers nobody
        else makes anything: it is the time that the stages take.
        """
        if self.stages and self._has_no_queue:
            return min(1.0, sum(stage.busy_ratio for stage in self.stages))
        if not self.is_loader or not self.stages:
            return self.waits
        queue = self.stages[-1].queue
        return min(self.waits, queue.get_wait_time / max(queue.elapsed, 1e-9))

    @property
    def own_work(self) -> float:
        """The part of it that a loader itself takes of the loop's thread, beside sampling."""
        return max(0.0, self.waits - self.waits_for_others - self.sampling)

    @property
    def is_for_sampler(self) -> bool:
        """Whether the loop's waits are mostly draws from its sampler."""
        return self.sampling > 0 and self.sampling >= _MOSTLY * self.waits

    @cached_property
    def is_for_loader(self) -> bool:
        """Whether the loop's waits are mostly what it does itself for many small batches that
        workers make, in giving out their jobs and taking them over; not the start of the workers.
        """
        own, num_items = self.own_work, self.num_delivered or 0
        is_short = own * self.stats.elapsed <= _HANDED_OVER_SECONDS * num_items
        is_many = not self.is_inline and num_items >= _MANY_ITEMS
        return is_many and is_short and own >= _MOSTLY * self.waits

    @property
    def is_for_all_items(self) -> bool:
        """Whether the waits are many and alike, not a few long ones, as at the start of passes:
        with these nine in ten are far below the mean, or of short passes one in ten is far above.
        """
        queue = self.stages[-1].queue
        mean, long = queue.ave_get_time, queue.p90_get_time
        is_short = 0 < mean <= _HANDED_OVER_SECONDS
        return queue.num_items >= _MANY_ITEMS and is_short and mean / 2 <= long <= 5 * mean

    # -- the busiest stage ------------------------------------------------------------------------

    @cached_property
    def busiest(self) -> StageStats:
        """The stage with the least headroom, whose threads are busy for the most time. Stages
        before it wait for room, those after it for items.
        """
        return max(self.stages, key=lambda stage: stage.busy_ratio)

    @property
    def is_of_workers(self) -> bool:
        """Whether a loader's workers run it: threads, or processes with one thread each."""
        return self.busiest.name in self.pooled

    @cached_property
    def bottleneck(self) -> StageStats:
        """The stage to name: the busiest; but a wait for the GIL may fall into any of those that
        share its threads, and only who computes can hold it."""
        if not (self.is_gil_taken or self.may_wait_for_gil):
            return self.busiest
        own = self._sharing(self.busiest)
        return max(own, key=lambda s: (s.busy_ratio * s.cpu_ratio, s.busy_ratio))

    def _sharing(self, stage: StageStats) -> Sequence[StageStats]:
        """Return the stages that run on the threads of this one, with itself."""
        pool = {*self.pooled}
        return [s for s in self.stages if s is stage or {s.name, stage.name} <= pool]

    @cached_property
    def load(self) -> Load:
        """The load of its threads."""
        return self.load_of(self.busiest)

    def load_of(self, stage: StageStats) -> Load:
        """Return the load of a stage's threads."""
        own = self._sharing(stage)
        busy = sum(each.busy_ratio for each in own)
        cpu = sum(each.busy_ratio * each.cpu_ratio for each in own) / busy if busy else 0.0
        is_timed = any(each.tasks.num_tasks > each.tasks.num_failures for each in own)
        load = Load(stage.concurrency, busy, cpu, None, is_timed)
        return load._replace(helpers=self._helpers_of(load, own))

    def _helpers_of(self, load: Load, own: Sequence[StageStats]) -> float | None:
        """Return the cores in use by threads that a load's ops start; None = not known: it was not
        measured, or they may be another stage's."""
        probes, busy = self.probes, load.threads * load.busy
        found = probes.helper_cores
        if found is None and probes.cores_used is not None:
            found = max(0.0, probes.cores_used - load.cores)  # at most; so much may not matter
            return 0.0 if found < _WAITING_OP * busy else None
        if found is None or found < _FEW_CORES:
            return found
        others = [each for each in self.stages if each not in own]
        waiting = (each.concurrency * each.busy_ratio * (1 - each.cpu_ratio) for each in others)
        return found if max(waiting, default=0.0) < _WAITED_FOR * busy * (1 - load.cpu) else None

    @property
    def run_delay(self) -> float:
        """The share of the threads' time in which they had no core, as far as it is known."""
        return self.probes.run_delay_ratio or 0.0

    @property
    def has_spare_time(self) -> bool:
        """Whether its threads have time left for more work."""
        if self.is_inline:
            # The loop's own thread loads only while the loop waits, so it cannot be busier.
            return self.load.busy < BUSY * self.waits
        # Threads may be without a core outside their ops, too.
        return self.load.busy + self.run_delay < BUSY and not self.has_no_core_left

    @property
    def waits_for_source(self) -> bool:
        """Whether every stage of a pipeline waits for its source."""
        is_idle = not self.is_loader and self.load.busy < BUSY
        return is_idle and self.stages[0].wait_in_ratio >= BUSY and not self.has_no_core_left

    @property
    def has_no_core_left(self) -> bool:
        """Whether the ops of a pipeline have all the cores, so that whoever hands them items waits
        for one: then they seem to wait for items."""
        num_cores = self.probes.num_cores
        if self.is_loader or num_cores is None or self.run_delay < RUN_DELAY:
            return False
        used = sum(self.load_of(stage).cores for stage in self.stages)
        return used >= _TAKEN_CORES * num_cores

    @property
    def waits_for_core(self) -> bool:
        """Whether workers wait for a core for most of their time while they are hardly in their
        ops: for many small batches they wake for each, and may wait for a core each time."""
        is_crew = self.is_loader and not self.is_inline
        return is_crew and self.load.busy < _IDLE and self.load.busy + self.run_delay >= BUSY

    @property
    def is_gil_taken(self) -> bool:
        """Whether its threads wait for the GIL as a rule."""
        waits = self.probes.gil_seconds
        if self.probes.own_gil or waits is None:
            return False
        interval = self.probes.switch_interval
        return is_taken(waits, interval, in_turns=self.load.looks_like_gil)

    @property
    def is_short_of_cores(self) -> bool:
        """Whether its threads wait for a core."""
        load, num_cores = self.load, self.probes.num_cores
        # Threads that mostly wait for storage may find the cores taken for a moment.
        is_incidental = load.waits and self.run_delay < load.busy * (1 - load.computing) / 2
        used = load.cores + (load.helpers or 0.0)
        uses_half = num_cores is not None and used >= num_cores / 2
        is_short = uses_half or self.others_have_cores
        return self.run_delay >= RUN_DELAY and (is_short or not is_incidental)

    @property
    def waits_for_storage(self) -> bool:
        """Whether its ops wait, and can wait for nothing but storage, a network or a lock: waits
        for a core and the GIL were measured, and they start no threads."""
        load, probes = self.load, self.probes
        knows_gil = load.threads == 1 or not self.lacks_gil_probe
        is_known = probes.run_delay_ratio is not None and load.helpers is not None and knows_gil
        return load.is_timed and load.waits and is_known

    @property
    def waits_for_shards(self) -> bool:
        """Whether most of the time of its ops, or of a pipeline's source, are waits for shards that
        are to be kept in a folder and are not there yet."""
        threads = 1.0 if self.waits_for_source else self.load.threads * self.load.busy
        waited = self.stats.counts.get("shards/wait_ms", 0) / 1e3
        return waited > 0 and waited >= _MOSTLY * threads * self.stats.elapsed

    @property
    def computes(self) -> bool:
        """Whether its ops compute all the time."""
        load = self.load
        return load.is_timed and not load.waits and load.computing >= COMPUTING_OP

    @property
    def may_wait_for_gil(self) -> bool:
        """Whether its threads may wait for the GIL, though it is not sure."""
        is_known = self.is_gil_taken or self.is_short_of_cores or self.computes
        return not is_known and self.may_take_turns(self.load, self.waits_for_storage)

    def may_take_turns(self, load: Load, is_known: bool) -> bool:
        """Return whether several threads may wait for the GIL, though it is not sure: they use no
        more than a core together, and a thread has to wait for it at times. CIFAR's pictures
        through Pillow let go of the GIL so often that a probe gets it at once, and two threads make
        fewer samples than one.

        is_known: whether it is known that they wait for storage.
        """
        probes = self.probes
        if probes.own_gil or load.threads < 2:
            return False
        if probes.gil_seconds is None:
            return not is_known and load.looks_like_gil
        waits = is_hinted(probes.gil_seconds, probes.switch_interval)
        return waits and take_turns(load.cores, begins_late=not is_known)

    @property
    def may_hide_gil(self) -> bool:
        """Whether more threads may be held up by the GIL: nobody looked at it, or what they do lets
        go of it so often that the probe sees nothing."""
        is_unknown = not (self.is_short_of_cores or self.waits_for_storage or self.computes)
        hides = is_unknown and self.load.looks_like_gil
        return not self.probes.own_gil and (self.lacks_gil_probe or hides)

    @property
    def others_have_cores(self) -> bool:
        """Whether other programs take the cores that its threads would use; False = not known."""
        return self.leaves_cores_to_others(self.load)

    def leaves_cores_to_others(self, load: Load) -> bool:
        """Return the same of any load."""
        probes = self.probes
        used, num_cores = probes.cores_used, probes.num_cores
        if used is None or num_cores is None or self.run_delay < RUN_DELAY:
            return False
        waits = max(0.0, load.busy * (1 - load.computing) - self.run_delay)
        return used < _TAKEN_CORES * num_cores and waits < _MOSTLY_WAITING * load.busy

    @property
    def lacks_gil_probe(self) -> bool:
        """Whether workers may share a GIL and nobody measured how long they wait for it."""
        return self.probes.gil_seconds is None and not self.probes.own_gil
