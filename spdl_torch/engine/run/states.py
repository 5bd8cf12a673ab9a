"""The states of a run, which may follow which, and the one object that goes from state to state."""

from __future__ import annotations

import enum
import threading

from ...errors import PipelineFailure, PipelineStopped


class RunState(enum.Enum):
    """The state of a run. Only its ``Lifecycle`` changes it."""

    NEW = "new"  # built; no thread exists
    RUNNING = "running"  # workers take, apply, put
    DRAINING = "draining"  # the source is exhausted or the run failed; items are in flight
    STOPPING = "stopping"  # stop was asked for: channels refuse items
    CLOSED = "closed"  # every thread has ended, or is left blocked in the user's source


MAY_FOLLOW: dict[RunState, frozenset[RunState]] = {
    RunState.NEW: frozenset({RunState.RUNNING, RunState.STOPPING}),
    RunState.RUNNING: frozenset({RunState.DRAINING, RunState.STOPPING}),
    RunState.DRAINING: frozenset({RunState.STOPPING, RunState.CLOSED}),
    RunState.STOPPING: frozenset({RunState.CLOSED}),
    RunState.CLOSED: frozenset(),
}


class Lifecycle:
    """The state of one run, and its first failure. Nothing here blocks.

    lock: held while the state is looked at and changed; whoever starts threads or changes their
        number holds it, too, so that a stop comes before or after.
    """

    def __init__(self) -> None:
        self.state = RunState.NEW
        # Held for moments, never in a wait. Re-entrant: the garbage collector may run a finalizer,
        # which stops the run, on a thread that holds it.
        self.lock = threading.RLock()
        self._failed: tuple[str, list[Exception]] | None = None

    def begin(self) -> None:
        """Go from new to running. Raises: PipelineStopped: the run was started or stopped."""
        with self.lock:
            if self.state is not RunState.NEW:
                raise PipelineStopped(f"start: the pipeline is {self.state.value}; it runs once.")
            self._advance(RunState.RUNNING)

    def fail(self, message: str, errors: list[Exception]) -> None:
        """Keep this failure, if it is the first."""
        with self.lock:
            if self._failed is None:
                self._failed = message, list(errors)

    @property
    def failure(self) -> PipelineFailure | None:
        """The first failure; None as long as nothing failed."""
        # Created anew each time. A raised exception refers to the frames that it passed, and so to
        # the Pipeline. Kept here, it would keep the Pipeline alive, whose end stops the run.
        return None if self._failed is None else PipelineFailure(*self._failed)

    def source_has_ended(self) -> None:
        """Note that the data has ended: what is left is in flight."""
        with self.lock:
            if self.state is RunState.RUNNING:
                self._advance(RunState.DRAINING)

    def stop(self) -> bool:
        """Begin to stop; return False if the run is closed."""
        with self.lock:
            if self.state is RunState.CLOSED:
                return False
            self._advance(RunState.STOPPING)
        return True

    def drain(self) -> bool:
        """Begin to close, as the data has ended or the run was stopped; return False if it is
        closed."""
        with self.lock:
            if self.state is RunState.RUNNING:
                self._advance(RunState.DRAINING)
            return self.state is not RunState.CLOSED

    def close(self) -> None:
        """Go to closed."""
        with self.lock:
            self._advance(RunState.CLOSED)

    def _advance(self, state: RunState) -> None:
        if state is self.state:
            return
        assert state in MAY_FOLLOW[self.state], f"{self.state} -> {state}"
        self.state = state
