"""Where a run is, and where it can go from there."""

from __future__ import annotations

import enum

__all__ = ["MOVES", "RunState"]


class RunState(enum.Enum):
    """Only ``Run._advance`` moves it, holding the lock."""

    NEW = "new"  # built, no thread exists
    RUNNING = "running"  # workers take, apply, put
    DRAINING = "draining"  # the source is exhausted or the run failed; items are in flight
    STOPPING = "stopping"  # stop was asked for: channels refuse items
    CLOSED = "closed"  # every thread has ended or, blocked in the user's source, was left


MOVES: dict[RunState, frozenset[RunState]] = {
    RunState.NEW: frozenset({RunState.RUNNING, RunState.STOPPING}),
    RunState.RUNNING: frozenset({RunState.DRAINING, RunState.STOPPING}),
    RunState.DRAINING: frozenset({RunState.STOPPING, RunState.CLOSED}),
    RunState.STOPPING: frozenset({RunState.CLOSED}),
    RunState.CLOSED: frozenset(),
}
