"""All that the items of a run go through."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..hooks.stats_queue import StatsQueue
    from ..stage.source import Source
    from ..stage.stage import Stage


class Node(Protocol):
    """A stage or a merge: it takes from queues and puts into queues, on threads of its own."""

    def enter(self) -> None:
        """Enter the hooks, before any thread starts."""

    def thread_targets(self) -> list[tuple[str, Callable[[], None]]]:
        """Return name and target of each thread that it begins with."""

    def request_stop(self) -> None:
        """End the waits that closed queues do not end. Never blocks."""


@dataclass(frozen=True, slots=True)
class QueueAt:
    """A queue and the number of the stage that fills it."""

    stage_number: int
    queue: StatsQueue
    is_given: bool
    """Whether the user gave the size; then it never changes."""


@dataclass(frozen=True, slots=True)
class Network:
    """The sources, stages and queues of a run, upstream first."""

    sources: list[Source] = field(default_factory=list)
    stages: list[Stage] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    """The stages, and what joins their paths."""
    queues: list[QueueAt] = field(default_factory=list)

    def queue_at(self, queue: StatsQueue) -> QueueAt:
        """Return where a queue of the run stands."""
        return next(at for at in self.queues if at.queue is queue)
