"""A loader as a discrete-event simulation: workers, cores, a GIL and a trainer, and no clock."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter, deque
from dataclasses import dataclass, replace

from _readings import PipelineStats, StageStats

from spdl_torch.observe import Placement, Probes, make_report
from spdl_torch.pipeline import QueuePerfStats, TaskPerfStats


@dataclass(frozen=True, kw_only=True)
class Loader:
    """Seconds that each sample takes, of what."""

    num_workers: int
    waits: float = 0.0
    gil: float = 0.0
    """Computing with the GIL."""
    cpu: float = 0.0
    """Computing without it."""
    step: float = 0.0
    num_cores: int = 2
    in_processes: bool = False
    num_samples: int = 8
    """In a batch."""
    spread: float = 0.2
    """Each time is up to this share longer or shorter, evenly."""


class _Resource:
    """So many tokens; who finds none waits in line."""

    def __init__(self, count):
        self.free, self.line = count, deque()


class Simulation:
    """Runs until the trainer has had its batches."""

    def __init__(self, loader, num_batches, seed=0):
        self.loader, self.counts, self.calls, self.now = loader, Counter(), [], 0.0
        self._random, self._number = random.Random(seed), itertools.count()
        self._events = []
        self._cores = _Resource(loader.num_cores)
        shared = _Resource(1)
        # Batches that may be under way or lie ready, as a loader's prefetch_factor=2 allows.
        self._room = _Resource(2 * loader.num_workers)
        self._batches = _Resource(0)
        for _ in range(loader.num_workers):
            self._start(self._worker(_Resource(1) if loader.in_processes else shared))
        self._start(self._trainer())
        while self.counts["taken"] < num_batches:
            self.now, _, process = heapq.heappop(self._events)
            self._advance(process)

    def _start(self, process):
        heapq.heappush(self._events, (self.now, next(self._number), process))

    def _advance(self, process):
        """Go on until the process waits, for a time or for a resource."""
        for wanted in process:
            if isinstance(wanted, float):
                heapq.heappush(self._events, (self.now + wanted, next(self._number), process))
                return
            if wanted.free:
                wanted.free -= 1
                continue
            wanted.line.append(process)
            return

    def _release(self, resource):
        if resource.line:
            self._start(resource.line.popleft())
        else:
            resource.free += 1

    def _time(self, mean):
        spread = self.loader.spread
        return mean * self._random.uniform(1 - spread, 1 + spread)

    def _compute(self, seconds):
        asked = self.now
        yield self._cores
        self.counts["no_core"] += self.now - asked
        yield seconds
        self.counts["cpu"] += seconds
        self._release(self._cores)

    def _worker(self, gil):
        loader, counts = self.loader, self.counts
        while True:
            asked = self.now
            yield self._room
            counts["idle"] += self.now - asked
            began = self.now
            for _ in range(loader.num_samples):
                sample_began = self.now
                if loader.waits:
                    yield self._time(loader.waits)
                if loader.gil:
                    yield gil
                    since = self.now
                    yield from self._compute(self._time(loader.gil))
                    counts["gil_held"] += self.now - since
                    self._release(gil)
                if loader.cpu:
                    yield from self._compute(self._time(loader.cpu))
                self.calls.append(self.now - sample_began)
            counts["busy"] += self.now - began
            self._release(self._batches)

    def _trainer(self):
        while True:
            yield self._batches
            self.counts["taken"] += 1
            self._release(self._room)
            if self.loader.step:
                self.counts["step"] += self.loader.step
                yield self.loader.step

    @property
    def rate(self):
        """Batches a second."""
        return self.counts["taken"] / self.now


def report_of(simulation):
    """Return the report that a loader would make of it."""
    loader, counts, seconds = simulation.loader, simulation.counts, simulation.now
    workers = loader.num_workers
    calls, times = len(simulation.calls), sorted(simulation.calls)
    p50, p90, p99 = (times[int(calls * share)] for share in (0.5, 0.9, 0.99))
    waited = max(0.0, seconds - counts["step"])
    fetch = StageStats(
        name="fetch",
        concurrency=workers,
        tasks=TaskPerfStats(
            *(calls, 0, counts["busy"] / calls, p90, p99, seconds),
            *(counts["cpu"] / calls, p50, counts["busy"]),
        ),
        queue=QueuePerfStats(seconds, counts["taken"], 0.0, 0.0, 0.5, get_wait_time=waited),
        num_dropped=0,
        busy_ratio=min(1.0, counts["busy"] / seconds / workers),
        wait_in_ratio=counts["idle"] / seconds / workers,
        wait_out_ratio=0.0,
        thread_time=seconds * workers,
    )
    is_taken = counts["gil_held"] > 0.85 * seconds and not loader.in_processes
    of_threads = {
        "gil_seconds": 5e-3 if is_taken else 1e-4,
        "gil_held_ratio": min(1.0, counts["gil_held"] / seconds),
        "run_delay_ratio": counts["no_core"] / seconds / workers,
    }
    probes = Probes(
        num_cores=loader.num_cores,
        helper_cores=0.0,
        own_gil=loader.in_processes,
        cores_used=counts["cpu"] / seconds,
        **({} if loader.in_processes else of_threads),
    )
    stats = PipelineStats(seconds, waited / seconds, (fetch,))
    placement = Placement(
        num_workers=workers,
        num_processes=workers if loader.in_processes else 0,
        reason="simulated",
    )
    return replace(make_report(stats, probes, pooled=("fetch",)), placements=(placement,))
