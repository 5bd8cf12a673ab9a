"""Tune pipelines while they run."""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING, Any

from ..machine.limits import Limits
from .tuning import PARTS, TuningState, manual_call

if TYPE_CHECKING:
    from collections.abc import Set

    from ..engine.loop import LazyRunner
    from ..engine.recorder import FlightRecorder
    from ..engine.run import Run
    from ..engine.statistics import PipelineStats
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
        return list(self.state.decisions.copy())

    def attach(self, run: Run) -> _Session:
        """Start tuning a new run. Raises: ValueError: the run keeps no statistics."""
        if not run.recorder.enabled:
            raise ValueError("build: tuner needs figures to go by. Leave out stats=False.")
        is_second = self._session is not None and self._session.is_going_on
        session = _Session(self.state, run, is_going_on=not is_second)
        if not is_second:
            self._session = session
            for name in session.tunable & self.state.found.keys():  # begin with what others found
                session.set_count(name, self.state.found[name])
            self.state.meter.begin_run()
        return session

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_session": None}


class _Session:
    """The tuning of one run, on the run's reporter thread."""

    is_heard = True

    def __init__(self, state: TuningState, run: Run, *, is_going_on: bool) -> None:
        self.interval: float | None = state.tuning.window_seconds / PARTS
        self.is_going_on = is_going_on
        """Whether the run may still be measured."""
        self._state = state
        self._run = run
        names = Counter(stage.name for stage in run.spec.pipes)  # settings go by name
        keep = state.tuning.keep
        self._free = {
            stage.name: stage.concurrency
            for stage in run.spec.pipes
            if names[stage.name] == 1 and stage.is_adjustable and stage.name not in keep
        }
        self._limits = state.tuning.limits()

    def report_interval(self, runner: LazyRunner) -> None:
        """Take a reading, and tune when a window is complete. The run calls this."""
        if not self.is_going_on:
            return
        try:
            if self._run.is_taking:
                self._state.look(self)
                return
            self._state.meter.end_run(self)
            self._state.log_settings(self.settings())
        except Exception:
            _logger.exception("autotune: it broke; the pipeline goes on with what it has.")
        self.is_going_on = False
        del self._run  # the tuner keeps this session, and it need not keep the run

    # What is tuned:

    @property
    def recorder(self) -> FlightRecorder:
        return self._run.recorder

    @property
    def tunable(self) -> Set[str]:
        return self._free.keys()

    def read(self) -> tuple[PipelineStats, int]:
        return self._run.snapshot(), self._run.num_delivered

    def memory_in_flight(self) -> int | None:
        then, left = self._limits.memory_bytes, Limits.of_this_machine().memory_bytes
        if then is None or left is None:
            return None
        return max(0, then - left) // self._limits.local_world_size

    def set_count(self, name: str, count: int) -> None:
        self._run.set_concurrency(name, count)

    def settings(self) -> str:
        found = self._state.found
        return manual_call({name: found.get(name, count) for name, count in self._free.items()}, {})
