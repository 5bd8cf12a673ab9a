"""Tune pipelines while they run: measure windows, ask the tuner, apply its steps."""

from __future__ import annotations

import logging
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

from ..machine.limits import Limits
from .tuning import TuningState, manual_call
from .window import PARTS, loads_of, window_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..engine.definition import StageSpec
    from ..engine.loop import LazyRunner
    from ..engine.run import Run
    from .tuner import Decision
    from .tuning import Tuning

_logger = logging.getLogger("spdl_torch.autotune")


class PipelineTuner:
    """Tunes one pipeline; each run starts from the previous result. Of two concurrent runs, the
    second is not tuned.
    """

    def __init__(self, tuning: Tuning) -> None:
        self.state = TuningState(tuning, "pipeline")
        self._session: _Session | None = None

    @property
    def decisions(self) -> list[Decision]:
        """The changes made so far, and why; at most the last 1000."""
        return list(self.state.decisions)

    def attach(self, run: Run) -> _Session:
        """Start tuning a new run. Raises: ValueError: the run keeps no statistics."""
        if not run.recorder.enabled:
            raise ValueError("build: tuner needs figures to go by. Leave out stats=False.")
        is_second = self._session is not None and self._session.is_going_on
        session = _Session(self.state, None if is_second else run)
        if not is_second:
            self._session = session
        return session

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_session": None}


class _Session:
    """The tuning of one run, on the run's reporter thread."""

    is_heard = True

    def __init__(self, state: TuningState, run: Run | None) -> None:
        self.interval: float | None = state.tuning.window_seconds / PARTS
        self._state = state
        self._run = run
        if run is None:
            return
        self._free = {stage.name: _is_free(stage, state.tuning.keep) for stage in run.spec.pipes}
        for name, count in Counter(stage.name for stage in run.spec.pipes).items():
            self._free[name] &= count == 1  # settings go by name, so a shared name is not tuned
        for name, count in state.found.items():
            if self._free.get(name):
                run.set_concurrency(name, count)
        self._limits = state.tuning.limits()
        if state.meter.is_within_run:
            state.meter.restart(skip=1)

    @property
    def is_going_on(self) -> bool:
        """Whether the run may still be measured."""
        return self._run is not None

    def report_interval(self, runner: LazyRunner) -> None:
        """Take a reading, and tune when a window is complete. The run calls this."""
        run = self._run
        if run is None:
            return
        try:
            if run.is_taking:
                self._look(run)
                return
            self._state.meter.end_run(run.snapshot(), run.num_delivered)
            self._state.log_settings(self._settings(run))
        except Exception:
            _logger.exception("autotune: it broke; the pipeline goes on with what it has.")
        self._run = None

    def _look(self, run: Run) -> None:
        readings = self._state.meter.look(run.snapshot(), run.num_delivered)
        if readings is None:
            return
        used = None
        left = Limits.of_this_machine().memory_bytes
        if self._limits.memory_bytes is not None and left is not None:
            used = max(0, self._limits.memory_bytes - left) // self._limits.local_world_size
        loads = loads_of(readings.stats, self._free)
        window = window_of(readings.parts, loads, probes=readings.probes, memory_bytes=used)
        self._state.step(window, run.set_concurrency, partial(self._settings, run), run.recorder)

    def _settings(self, run: Run) -> str:
        concurrency: Mapping[str, int] = {
            stage.name: self._state.found.get(stage.name, stage.concurrency)
            for stage in run.spec.pipes
            if self._free[stage.name]
        }
        return manual_call(concurrency, {})


def _is_free(stage: StageSpec, keep: frozenset[str]) -> bool:
    """Return whether the stage has its own threads, whose number does not affect its output."""
    is_safe = stage.concurrency > 1 or (
        stage.output_order == "input" and stage.kind.value == "function"
    )
    return stage.is_adjustable and is_safe and stage.executor is None and stage.name not in keep
