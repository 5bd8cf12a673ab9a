"""The object that a user holds: it starts, iterates and stops one run."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from ..engine.definition import BuildOptions
from ..engine.recorder import FlightRecorder
from ..engine.run import Run, RunState
from ..errors import PipelineFailure, PipelineStopped
from ..handlers import unless_of_handler
from ..locks import weakly
from ..scopes import scope

if TYPE_CHECKING:
    from ..engine.definition import PipelineSpec
    from ..engine.statistics import PipelineStats
    from ..engine.timeline import Timeline
    from ..observe.trace.profile import Profile
    from ..observe.verdict.report import Report

T = TypeVar("T")


class Pipeline(Generic[T]):
    """One run of a pipeline definition, on threads of this process.

    With a continuous source that one run covers all epochs: each iterator yields one. If it is left
    early, the next iterator yields the rest of that epoch.

    ``break``, an exception in the loop body and Ctrl-C: leaving ``auto_stop()``, calling
    ``stop()`` or dropping the object ends every thread. A running op is not interrupted: it
    finishes, then its thread ends; ``stop()`` waits for that. A source that is blocked in its own
    ``next()`` is not waited for. None of this keeps the interpreter from exiting.

    One thread at a time may take items.
    """

    def __init__(
        self,
        spec: PipelineSpec[T],
        options: BuildOptions | None = None,
        *,
        recorder: FlightRecorder | None = None,
    ) -> None:
        options = options or BuildOptions()
        recorder = recorder or FlightRecorder("Pipeline", enabled=options.stats)
        self._run = Run(spec, options, recorder)
        # The run knows nothing of this object, so its threads do not keep it alive; they keep the
        # run alive, which needs no end before they start or when they have ended.
        self._finalizer = weakref.finalize(self, weakly(self._run.request_stop))
        self._finalizer.atexit = False  # the thread group stops the run at exit, and joins it

    def start(self, *, timeout: float | None = None, daemon: bool = False) -> None:
        """Start the threads now instead of at the first item.

        timeout, daemon: make no difference: nothing is waited for here, and no thread of a
            pipeline ever keeps the interpreter from exiting.
        Raises: PipelineStopped: the pipeline was started or stopped before.
        """
        self._run.start()

    def stop(self, timeout: float | None = None) -> None:
        """End every thread and wait for it; idempotent. Returns within 50 ms when no op runs, no
        later than the running op otherwise.

        Raises: TimeoutError: an op still runs after ``timeout`` seconds.
        """
        self._run.stop(timeout)

    @scope
    def auto_stop(self, timeout: float | None = None) -> Iterator[Self]:
        """Start on entry, ``stop(timeout)`` on exit, however the block ends."""
        try:
            if self._run.state is RunState.NEW:
                self._run.start()
            yield self
        finally:
            self._run.stop(timeout)

    def get_item(self, timeout: float | None = None) -> T:
        """Return the next item; wait at most ``timeout`` seconds, None = as long as it takes.

        Raises: EOFError: the data has ended or, of a continuous source, an epoch, once: the next
            call gives the first item of the next; TimeoutError: no item came in time, call again;
            PipelineFailure: too many items failed or the source raised; PipelineStopped.
        """
        item: T = self._run.get(timeout)
        return item

    def get_iterator(self, timeout: float | None = None) -> Iterator[T]:
        """Iterate over the remaining items, those of this epoch if the source is continuous;
        ``timeout`` and errors as for ``get_item``.

        Raises: PipelineStopped: the pipeline has run to its end or was stopped.
        """
        if self._run.state in (RunState.STOPPING, RunState.CLOSED):
            raise PipelineStopped(
                f"this pipeline is {self._run.state.value} and runs only once. Build another one "
                "for another pass."
            )
        return _Items(self, timeout)

    def __iter__(self) -> Iterator[T]:
        return self.get_iterator()

    @property
    def failure(self) -> PipelineFailure | None:
        """The error that iteration raises after the last good item; None if nothing failed."""
        return self._run.failure

    @property
    def num_lost(self) -> int:
        """Items that ops have dropped (None) or failed so far, over all stages."""
        return self._run.num_lost

    def snapshot(self) -> PipelineStats:
        """Return the statistics of every stage since the start, open waits included."""
        return self._run.snapshot()

    def report(self) -> Report:
        """Judge what has held the loop back so far: ``print(pipeline.report())``.

        Raises: RuntimeError: the pipeline was not started.
        """
        from ..observe.verdict.report import make_report  # only for who asks

        if self._run.state is RunState.NEW:
            raise RuntimeError("Pipeline: there are no figures, nothing was loaded yet.")
        return make_report(self.snapshot(), self._run.probes())

    def profile(self) -> Profile:
        """Return the report, with a record of what every thread did in the last seconds:
        ``pipeline.profile().write_trace("trace.json.gz")``. Raises: as ``report``.
        """
        from ..observe.trace.tracing import profile_of_run

        return profile_of_run(self.report(), self.timeline(), None)

    @property
    def decisions(self) -> list[Any]:
        """The changes made so far by the tuner, and why; at most the last 1000."""
        return list(getattr(self._run.options.tuner, "decisions", ()))

    def timeline(self) -> Timeline:
        """Return what every thread did in the last seconds; see ``observe.trace.tracing``."""
        return self._run.recorder.timeline()

    def __repr__(self) -> str:
        return self._run.describe()


class _Items(Iterator[T]):
    """The rest of a pipeline's items. It is over where they are, and where the pipeline failed or
    was stopped: not after a TimeoutError."""

    def __init__(self, pipeline: Pipeline[T], timeout: float | None) -> None:
        self._pipeline = pipeline
        self._timeout = timeout
        self._is_over = False

    def __next__(self) -> T:
        if not self._is_over:
            try:
                return self._pipeline.get_item(self._timeout)
            except unless_of_handler(EOFError):
                self._is_over = True
            except unless_of_handler(PipelineFailure, PipelineStopped):
                self._is_over = True
                raise
        raise StopIteration
