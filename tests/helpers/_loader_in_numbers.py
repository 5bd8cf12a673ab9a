"""A loader in numbers: what each part of its time is, and which place lets through the least."""

from __future__ import annotations

from dataclasses import dataclass, replace

from _readings import pipeline_stats, stage_stats

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

    @property
    def places(self):
        """Batches a second that each place lets through; the order decides between equals."""
        each = {
            "step": self.step,
            "gil": 0.0 if self.in_processes else self.gil * self.num_samples,
            "cores": (self.gil + self.cpu) * self.num_samples / self.num_cores,
            "workers": (self.waits + self.gil + self.cpu) * self.num_samples / self.num_workers,
        }
        return {name: 1 / seconds for name, seconds in each.items() if seconds}

    @property
    def rate(self):
        """Batches a second."""
        return min(self.places.values())


def report_of(loader, num_batches):
    """Return the report that a loader would make of so many batches."""
    workers, seconds = loader.num_workers, num_batches / loader.rate
    calls = num_batches * loader.num_samples
    limit = min(loader.places, key=loader.places.__getitem__)
    needed = calls * (loader.waits + loader.gil + loader.cpu)
    # Workers that the training loop does not hold up are busy, if only with waits for each other.
    busy = needed if limit == "step" else seconds * workers
    cpu, gil_held = calls * (loader.gil + loader.cpu), calls * loader.gil
    waited = max(0.0, seconds - num_batches * loader.step)
    time = busy / calls
    fetch = stage_stats(
        name="fetch",
        concurrency=workers,
        tasks=TaskPerfStats(calls, 0, time, time, time, seconds, cpu / calls, time, busy),
        queue=QueuePerfStats(seconds, num_batches, 0.0, 0.0, 0.5, get_wait_time=waited),
        busy_ratio=busy / seconds / workers,
        wait_in_ratio=1 - busy / seconds / workers,
    )
    of_threads = {
        "gil_seconds": 5e-3 if limit == "gil" else 1e-4,
        "gil_held_ratio": min(1.0, gil_held / seconds),
        "run_delay_ratio": (busy - needed) / seconds / workers if limit == "cores" else 0.0,
    }
    probes = Probes(
        num_cores=loader.num_cores,
        helper_cores=0.0,
        own_gil=loader.in_processes,
        cores_used=cpu / seconds,
        **({} if loader.in_processes else of_threads),
    )
    stats = pipeline_stats(seconds, waited / seconds, (fetch,))
    num_processes = workers if loader.in_processes else 0
    placement = Placement(num_workers=workers, num_processes=num_processes, reason="made up")
    return replace(make_report(stats, probes, pooled=("fetch",)), placement=placement)
