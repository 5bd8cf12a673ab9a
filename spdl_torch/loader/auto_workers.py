"""``num_workers="auto"``: the trainer's thread adds and removes a loader's workers."""

from __future__ import annotations

import weakref
from time import perf_counter
from typing import TYPE_CHECKING, Any

from ..autotune.estimate import nbytes_of
from ..autotune.tuner import StageLoad
from ..autotune.tuning import manual_call
from ..autotune.window import PARTS, window_of
from ..autotune.workers import AutoWorkers

if TYPE_CHECKING:
    from ..autotune.tuner import Window
    from ..autotune.tuning import TuningState
    from ..autotune.window import WindowReadings
    from ..engine.statistics import StageStats
    from .backends.backend import Backend
    from .base_loader import BaseLoader

WORKERS = "num_workers"
"""The name of the loader's one stage in decisions."""


class LoaderTuner:
    """Tunes the workers of one iterator, threads or processes of one worker each; keeps its result
    in ``state`` and in the loader's ``num_workers``.
    """

    def __init__(self, loader: BaseLoader[Any], state: TuningState, backend: Backend) -> None:
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
        if self._state.meter.is_within_run:  # the last loop was left before its epoch's end
            self._state.meter.restart(skip=1)
        self._part_seconds = self._state.tuning.window_seconds / PARTS
        self._due = perf_counter()

    @property
    def max_outstanding(self) -> int:
        """The number of batches in flight: the prefetch of all workers as far as the memory limit
        allows, and at least one for each worker.
        """
        workers, bounds = self._num_workers, self._state.bounds
        wanted = self._prefetch * workers
        if not self._batch_bytes or bounds is None or bounds.memory_bytes is None:
            return wanted
        room = bounds.memory_bytes // self._batch_bytes - workers - 1
        return max(workers, min(wanted, room))

    def after(self, batch: Any) -> None:
        """Count a received batch, and tune when a reading is due. Costs 0.1 µs otherwise."""
        self._num_batches += 1
        if not self._is_sized and batch is not None:
            self._batch_bytes, self._is_sized = nbytes_of(batch), True
        now = perf_counter()
        if now < self._due:
            return
        self._due = now + self._part_seconds
        readings = self._state.meter.look(
            self._backend.stats.snapshot_of_workers(), self._num_batches
        )
        if readings is not None:
            self._state.step(
                self._window(readings),
                lambda _, count: self._resize(count),
                self._settings,
                self._backend.stats.recorder,
            )

    def end(self) -> None:
        """Take the epoch's last reading, and log the settings found so far."""
        self._state.meter.end_run(self._backend.stats.snapshot_of_workers(), self._num_batches)
        if self._state.found:
            self._state.log_settings(self._settings())

    def _window(self, readings: WindowReadings) -> Window:
        stages = {stage.name: stage for stage in readings.stats.stages}
        load = _load_of(
            self._num_workers,
            stages["fetch"],
            stages["collate"],
            shares_gil=not self._state.are_processes,
        )
        in_flight = None
        if self._batch_bytes:
            in_flight = self._batch_bytes * (self.max_outstanding + self._num_workers + 1)
        return window_of(readings.parts, (load,), probes=readings.probes, memory_bytes=in_flight)

    def _resize(self, count: int) -> None:
        self._num_workers = count  # for max_outstanding
        self._note(self._backend.resize(count, self.max_outstanding))

    def _note(self, count: int) -> None:
        self._num_workers = count
        self._state.found[WORKERS] = self._num_workers
        loader = self._loader()
        if loader is not None:
            loader.num_workers = AutoWorkers(self._num_workers, self._state.tuning)

    def _settings(self) -> str:
        return manual_call({}, {}, num_workers=self._num_workers)


def _load_of(
    num_workers: int, fetch: StageStats, collate: StageStats, *, shares_gil: bool
) -> StageLoad:
    """Return the load of fetching and collating together: the same workers do both."""
    busy = fetch.tasks.busy_time + collate.tasks.busy_time
    return StageLoad(
        name=WORKERS,
        concurrency=num_workers,
        busy_seconds=busy,
        busy_ratio=min(1.0, busy / max(1e-9, fetch.thread_time)),
        cpu_seconds=sum(t.ave_cpu_time * t.num_tasks for t in (fetch.tasks, collate.tasks)),
        num_tasks=fetch.tasks.num_tasks,
        shares_gil=shares_gil,
    )
