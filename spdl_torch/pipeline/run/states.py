"""The states of a run, and which may follow which."""

from __future__ import annotations

import enum


class RunState(enum.Enum):
    """The state of a run. Only ``Run._advance`` changes it, with the run's lock held."""

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
