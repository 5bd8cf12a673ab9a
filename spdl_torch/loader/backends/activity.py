"""What each worker of a loader does now: for the message of a loop that waited too long, and for
forks, during which the worker threads of this process rest.

A forked child has the memory of all threads, but only the thread that forked. A lock that another
one held at that moment (of HDF5, of a logger, of the dataset's own) stays held in the child for
ever. Between two jobs a worker runs no code of the dataset's, so it waits there until the fork is
done.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from time import monotonic, perf_counter_ns, sleep
from typing import TYPE_CHECKING

from ...locks import LiveObjects, RLock, in_forked_child
from ...scopes import scope

if TYPE_CHECKING:
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
        self.lock = RLock()
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
    from ...engine.stacks import describe_busy, stack_of  # for loops that wait too long

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
    if not found:  # perhaps a worker waits for a pipeline, whose threads are others
        me, ours = threading.current_thread(), threading.enumerate()
        return describe_busy([each for each in ours if each.name[:5] == "spdl-" and each is not me])
    found.sort(key=lambda each: each[0])
    return "\n".join(["Busy threads:", *(text for _, text in found[:_MOST_STACKS])])


_LONGEST_SECONDS = 1.0
"""The longest wait for jobs to end. Then the process is forked all the same, as it would be by
torch's loader beside threads of the program's own."""
_LOOK_SECONDS = 0.001

activities: LiveObjects[Activity] = LiveObjects()
"""Those of the worker threads of this process, which rest during forks."""
_listing = RLock()
_forks: set[object] = set()  # one for each fork under way, changed while _listing is held
may_work = threading.Event()  # set while there is none
may_work.set()


def begin_job(activity: Activity, job: Job) -> None:
    """Note that a worker begins a job; wait first if the process is being forked.

    The job is noted before the look at the flag, and a fork raises the flag before it looks at the
    jobs: so one of the two sees the other. The lock makes "before" true for other cores, too:
    without a GIL, one may read the flag while its note is still on the way to the others.
    """
    with activity.lock:
        activity.job = job
    while not may_work.is_set():
        activity.job = None
        may_work.wait()
        with activity.lock:
            activity.job = job


@scope
def workers_at_rest() -> Iterator[None]:
    """Wait up to a second for all workers to finish their jobs, and keep them from beginning others
    until this block ends, and those of other threads that fork at the same time."""
    fork = object()
    try:
        with _listing:
            _forks.add(fork)
            may_work.clear()
        # Not by notification: for this alone, a worker would have to take a lock after each job.
        deadline = monotonic() + _LONGEST_SECONDS
        while any(map(_works, activities.now())) and monotonic() < deadline:
            sleep(_LOOK_SECONDS)
        yield
    finally:
        with _listing:
            _forks.discard(fork)
            if not _forks:
                may_work.set()


def _works(activity: Activity) -> bool:
    with activity.lock:
        return activity.job is not None


@in_forked_child
def _after_fork() -> None:
    """Start anew in the child, where no thread works and either lock may be held."""
    global may_work, _listing
    may_work, _listing = threading.Event(), RLock()
    may_work.set()
    _forks.clear()
    activities.clear()
