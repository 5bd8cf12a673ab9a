"""``num_workers="auto"``: the trainer's thread adds and removes a loader's workers."""

from __future__ import annotations

import weakref
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

from ..autotune.tuning import PARTS, nbytes_of
from ..autotune.workers import AutoWorkers
from ..engine.statistics import PipelineStats, StageStats

if TYPE_CHECKING:
    from ..autotune.tuning import TuningState
    from ..engine.recorder import FlightRecorder
    from .backends.backend import Backend
    from .dataloader import DataLoader

WORKERS = "num_workers"
"""The name of the loader's one stage in decisions."""


class LoaderTuner:
    """Tunes the workers of one iterator, threads or processes of one worker each; keeps its result
    in ``state`` and in the loader's ``num_workers``.
    """

    def __init__(self, loader: DataLoader[Any], state: TuningState, backend: Backend) -> None:
        self._loader = weakref.ref(loader)
        self._state = state
        self._backend = backend
        self._num_workers = int(loader.num_workers)
        self._prefetch = loader.prefetch_factor or 1
        self._batch_bytes: int | None = None
        self._is_sized = False
        self.begin()

    def begin(self) -> None:
        """Begin to measure an epoch."""
        self._num_batches = 0
        self._state.begin_run()
        self._part_seconds = self._state.tuning.window_seconds / PARTS
        self._due = perf_counter()

    @property
    def max_outstanding(self) -> int:
        """The number of batches in flight: the prefetch of all workers as far as the memory limit
        allows, and at least one for each worker.
        """
        workers, most_bytes = self._num_workers, self._state.tuner.bounds.memory_bytes
        wanted = self._prefetch * workers
        if not self._batch_bytes or most_bytes is None:
            return wanted
        room = most_bytes // self._batch_bytes - workers - 1
        return max(workers, min(wanted, room))

    def after(self, batch: Any) -> None:
        """Count a received batch, and tune when a reading is due. Costs 0.1 µs otherwise."""
        self._num_batches += 1
        if not self._is_sized and batch is not None:
            self._batch_bytes, self._is_sized = nbytes_of(batch), True
        now = perf_counter()
        if now >= self._due:
            self._due = now + self._part_seconds
            self._state.look(self)

    def end(self) -> None:
        """Take the epoch's last reading."""
        self._state.end_run(self)

    # What is tuned:

    tunable = frozenset({WORKERS})

    @property
    def recorder(self) -> FlightRecorder | None:
        return self._backend.stats.recorder

    def read(self) -> tuple[PipelineStats, int]:
        """Return fetching and collating as one stage: the same workers do both."""
        stats = self._backend.stats.snapshot(of_workers=True)
        stages = {stage.name: stage for stage in stats.stages}
        fetch, collate = stages["fetch"], stages["collate"]
        busy_ns = fetch.busy_ns + collate.busy_ns
        both = StageStats(
            name=WORKERS,
            concurrency=self._num_workers,
            thread_ns=fetch.thread_ns,
            num_tasks=fetch.num_tasks,
            busy_ns=busy_ns,
            cpu_ns=fetch.cpu_ns + collate.cpu_ns,
            wait_in_ns=fetch.thread_ns - busy_ns,
        )
        return replace(stats, stages=(both,)), self._num_batches

    def memory_in_flight(self) -> int | None:
        num_batches = self.max_outstanding + self._num_workers + 1
        return self._batch_bytes * num_batches if self._batch_bytes else None

    def set_count(self, name: str, count: int) -> None:
        self._num_workers = count  # for max_outstanding
        self._num_workers = self._backend.resize(count, self.max_outstanding)
        self._state.found[WORKERS] = self._num_workers
        loader = self._loader()
        if loader is not None:
            loader.num_workers = AutoWorkers(self._num_workers, self._state.tuning)
