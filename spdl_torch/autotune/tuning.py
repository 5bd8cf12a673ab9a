"""The options of tuning, what it measures, its results, and where they are reported; and pipelines
that are tuned while they run."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from ..machine.limits import Limits
from ..machine.probes import probe_counters
from ..machine.readings import probes_between
from ..observe.store.entries import DECISION_EVENT
from .tuner import Bounds, Tuner, Window, window_of

if TYPE_CHECKING:
    from ..engine.loop import LazyRunner
    from ..engine.recorder import FlightRecorder
    from ..engine.run import Run
    from ..engine.statistics import PipelineStats
    from .tuner import Decision

_logger = logging.getLogger("spdl_torch.autotune")

_MOST_DECISIONS = 1000

PARTS = 4
"""The number of readings in a window; the spread of the consumer's rate gives the noise."""

_LEAST_ITEMS = 20
_LONGEST = 5
"""The factor by which a window may be extended if too few items come."""
_MEMORY_UTIL = 0.7
"""The share of the memory that is available at the start that items in flight may take."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuning:
    """The user's options; see ``PerfParams.auto``."""

    keep: frozenset[str] = frozenset()
    max_threads: int | None = None
    window_seconds: float = 2.0
    """The time between two changes; longer while few items come."""

    def bounds(self, *, are_processes: bool = False) -> Bounds:
        """Return the bounds of this rank's part, of threads or of processes."""
        limits = Limits.of_this_machine()
        cores = limits.own_cores
        threads = self.max_threads or max(32, int(8 * cores))  # most may wait for storage
        if are_processes:
            threads = min(threads, max(8, int(2 * cores)))  # each takes memory
        memory = limits.own_memory(_MEMORY_UTIL)
        return Bounds(threads=threads, cores=cores, memory_bytes=memory)


class Tuned(Protocol):
    """What is tuned: a run of a pipeline, or the workers of a loader's iterator."""

    @property
    def recorder(self) -> FlightRecorder | None: ...

    @property
    def tunable(self) -> Set[str]:
        """The names of the stages whose concurrency may be changed."""

    def read(self) -> tuple[PipelineStats, int]:
        """Return the statistics, and the items that the consumer took, since the run began."""

    def memory_in_flight(self) -> int | None:
        """Return the most bytes in flight with the present settings; None = unknown."""

    def set_count(self, name: str, count: int) -> None:
        """Change a stage's concurrency."""


class TuningState:
    """The state of tuning over all runs of one pipeline or loader.

    Readings, taken several times a window, are cut into complete windows. The part of a window
    right after a start or a change, and the first window, are not measured. If runs (epochs) are
    shorter than a window, it continues in the next one.
    """

    def __init__(self, tuning: Tuning, name: str, *, are_processes: bool = False) -> None:
        self.tuning = tuning
        self.are_processes = are_processes
        """Whether a loader's workers are processes."""
        self.name = name
        self.found: dict[str, int] = {}
        """The changed concurrency by stage, with which the next run begins."""
        self._decisions: list[Decision] = []  # which any thread copies, in one step
        self._last: tuple[PipelineStats, int] | None = None  # with which the next part begins
        self._restart(skip=1 + PARTS)  # nor the first window, in which all begins

    @property
    def decisions(self) -> list[Decision]:
        """The changes made so far, and why; at most the last 1000."""
        return self._decisions.copy()

    @cached_property
    def tuner(self) -> Tuner:
        """The tuner, which continues where the last run ended."""
        return Tuner(self.tuning.bounds(are_processes=self.are_processes))

    def look(self, tuned: Tuned) -> None:
        """Take a reading. When a window is complete, make the tuner's changes, report its
        decisions, and begin the next one.
        """
        self._read(tuned)
        elapsed = sum(part.stats.elapsed for part in self._parts) / self.tuning.window_seconds
        num_items = sum(part.num_items for part in self._parts)
        if elapsed < 0.95 or (num_items < _LEAST_ITEMS and elapsed < _LONGEST):
            return
        probes = probes_between(self._probes_before, probe_counters())
        memory = tuned.memory_in_flight()
        window = window_of(self._parts, tunable=tuned.tunable, probes=probes, memory_bytes=memory)
        change, decisions = self.tuner.step(window)
        if change is not None:
            name, count = change
            self.found[name] = count
            tuned.set_count(name, count)
        for decision in decisions:
            self._report(decision, tuned.recorder)
        self._restart(skip=int(change is not None))

    def begin_run(self) -> None:
        """Begin anew if the last run was left before its end, so that its figures lack a part."""
        if self._last is not None:
            self._restart(skip=1)

    def end_run(self, tuned: Tuned) -> None:
        """Take a run's last statistics; the window continues with the next run."""
        if self._last is not None:
            self._read(tuned)
            self._last = None

    def _restart(self, *, skip: int) -> None:
        """Discard the measurements and begin a window whose first ``skip`` parts are left out."""
        self._last = None
        self._num_to_skip = skip
        self._parts: list[Window] = []
        self._probes_before = probe_counters()

    def _read(self, tuned: Tuned) -> None:
        stats, num_items = tuned.read()
        then, self._last = self._last, (stats, num_items)
        if then is None:
            return
        if self._num_to_skip:
            self._num_to_skip -= 1
        elif stats.elapsed_ns > then[0].elapsed_ns:
            part = Window(stats=stats.since(then[0]), num_items=num_items - then[1])
            self._parts.append(part)

    def _report(self, decision: Decision, recorder: FlightRecorder | None) -> None:
        del self._decisions[: 1 - _MOST_DECISIONS]
        self._decisions.append(decision)
        _logger.info("%s: %s", self.name, decision)
        details = decision.as_details()
        if recorder is not None:
            recorder.note(DECISION_EVENT, details)

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes of a copy, which begins with the results and tunes separately."""
        own = TuningState(self.tuning, self.name, are_processes=self.are_processes)
        return {**vars(own), "found": dict(self.found)}


class PipelineTuner(TuningState):
    """Tunes one pipeline; each run starts from the previous result. Of two concurrent runs, the
    second is not tuned.
    """

    _session: _Session | None = None

    def attach(self, run: Run) -> _Session:
        """Start tuning a new run. Raises: ValueError: the run keeps no statistics."""
        if not run.recorder.enabled:
            raise ValueError("build: tuner needs figures to go by. Leave out stats=False.")
        is_second = self._session is not None and self._session.is_going_on
        session = _Session(self, run, is_going_on=not is_second)
        if not is_second:
            self._session = session
            for name in session.tunable & self.found.keys():  # begin with what others found
                session.set_count(name, self.found[name])
            self.begin_run()
        return session


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
        self.tunable = {
            stage.name
            for stage in run.spec.pipes
            if names[stage.name] == 1 and stage.is_adjustable and stage.name not in keep
        }
        self._memory_then = Limits.of_this_machine().memory_bytes

    def report_interval(self, runner: LazyRunner) -> None:
        """Take a reading, and tune when a window is complete. The run calls this."""
        if not self.is_going_on:
            return
        try:
            if self._run.is_taking:
                self._state.look(self)
                return
            self._state.end_run(self)
        except Exception:
            _logger.exception("autotune: it broke; the pipeline goes on with what it has.")
        self.is_going_on = False
        del self._run  # the tuner keeps this session, and it need not keep the run

    # What is tuned:

    @property
    def recorder(self) -> FlightRecorder:
        return self._run.recorder

    def read(self) -> tuple[PipelineStats, int]:
        return self._run.snapshot(), self._run.outlet.counters().num_got

    def memory_in_flight(self) -> int | None:
        limits, then = Limits.of_this_machine(), self._memory_then
        if then is None or limits.memory_bytes is None:
            return None
        return max(0, then - limits.memory_bytes) // limits.local_world_size

    def set_count(self, name: str, count: int) -> None:
        self._run.set_concurrency(name, count)


_NUMBER_BYTES = 8  # as a tensor: int64 or float64


def nbytes_of(element: Any) -> int | None:
    """Return the bytes of tensors, arrays, buffers, strings and numbers in nested containers and
    dataclasses; None = there is something else among them.
    """
    try:
        return nbytes_in(element)
    except (TypeError, RecursionError):
        return None


def nbytes_in(element: Any) -> int:
    """Do the same. Raises: TypeError: there is something else among them."""
    if element is None:
        return 0
    if isinstance(element, int | float | complex):
        return _NUMBER_BYTES
    if isinstance(element, str | bytes | bytearray):
        return len(element)
    nbytes = getattr(element, "nbytes", None)  # tensors, arrays, NumPy scalars, memoryviews
    if isinstance(nbytes, int):
        return nbytes
    if isinstance(element, Mapping):
        element = element.values()
    elif is_dataclass(element):
        element = [getattr(element, each.name) for each in fields(element)]
    elif not isinstance(element, Sequence | Set):
        raise TypeError(f"the size of a {type(element).__name__} is not known")
    return sum(map(nbytes_in, element))
