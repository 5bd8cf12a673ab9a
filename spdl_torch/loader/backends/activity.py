"""The activity of each worker of a loader, for the message of a loop that waited too long."""

from __future__ import annotations

import threading
from time import perf_counter_ns
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..fetching.batch_maker import BatchMaker
    from .jobs import Job

_MOST_STACKS = 8


class Activity:
    """The job that one worker has now. The worker writes it once per batch; any thread may read."""

    __slots__ = (
        "__weakref__",
        "beginning",
        "job",
        "lock",
        "maker",
        "since_ns",
        "thread",
    )

    def __init__(self) -> None:
        self.beginning = ""
        """The step of the worker's or its epoch's beginning that user code takes now."""
        self.maker: BatchMaker | None = None
        # Looked at without a lock before the process is forked, too: see begin_job().
        self.job: Job | None = None
        self.lock = threading.Lock()
        """Held where ``job`` is written or read by those who must not miss each other."""
        self.since_ns = 0
        self.thread: threading.Thread | None = None

    def describe(self) -> tuple[int, str]:
        """Return the number of the worker's batch, -1 between batches, and a description."""
        job, maker = self.job, self.maker  # read once: the worker may clear them meanwhile
        if job is None or maker is None:
            return -1, self.beginning or "between batches"
        seconds = (perf_counter_ns() - self.since_ns) / 1e9
        return job.number, f"batch {job.number} for {seconds:.1f} s: {maker.at_work(job.index)}"


def describe_activities(
    activities: Sequence[Activity], threads: Sequence[threading.Thread], awaited: int | None
) -> str:
    """Describe the threads that are at work, with their stacks, those on the ``awaited`` batch
    first (None = any batch would do). ``threads``: those of the activities, and perhaps others.
    """
    from ...engine.stacks import stack_of  # for loops that wait too long

    found = []
    activity_of = {activity.thread: activity for activity in activities}
    for thread in threads:
        stack = stack_of(thread)  # "": it waits in our own code
        if thread in activity_of:
            batch, doing = activity_of[thread].describe()
        else:
            batch, doing = -1, "stage 'transfer'"
        if stack:
            found.append((batch != awaited, f"{thread.name}, {doing}\n{stack}"))
    if not found:
        return "None of its threads is at work."
    found.sort(key=lambda each: each[0])
    return "\n".join(["Busy threads:", *(text for _, text in found[:_MOST_STACKS])])
