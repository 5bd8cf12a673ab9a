"""One budget of threads for all loaders of a process.

Each loader has as many worker threads as it was asked to have. Where several are in an epoch at
once, the jobs that run at one time are as many as the cores, or as the largest of these loaders has
workers: a loader alone is never held up. Workers that only wait for storage take neither a core nor
the GIL, so the limit rises as long as both have room.

Threads of persistent loaders whose epoch is over are let go beyond a number, those first that have
rested longest. Their workers stay, and get new threads with the next epoch.

A job waits for its turn before it begins, never within. A worker that itself waits for another
loader's batch gives its turn away. Whatever else workers wait for, after a second without any
job's end one more may run: nothing waits forever.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol

from ...autotune.limits import Limits
from ...observe.verdict.probes import probe_counters, probes_between
from ...pipeline.channel.channel import Channel, ChannelClosed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...observe.verdict.probes import ProbeCounters
    from .activity import Activity

__all__ = ["Member", "ThreadBudget", "budget"]

_LOOK_SECONDS = 0.6
"""The time between two looks at the cores: the probe of the GIL needs half a second."""
_STUCK_SECONDS = 1.0
"""The time without any job's end after which one more may run."""
_ROOM = 0.7
"""The share of the cores below which there is room for more."""
_ONE_CORE = (0.7, 1.35)
"""The cores that workers use together where the GIL may be what limits them."""
_GIL_TAKEN = 0.2
"""The wait for the GIL, over the switch interval, from which it counts as taken."""
_MOST_RESTING = 64
"""The number of threads that may rest, at least: together they take about 7 MB."""


class Member(Protocol):
    """A pool of worker threads."""

    @property
    def activities(self) -> Sequence[Activity]:
        """The job that each worker has now."""
        ...

    def retire(self) -> None:
        """Let the threads go, if no epoch runs; the workers stay. Never blocks."""
        ...


@dataclass(slots=True, eq=False)
class _Waiter:
    """A worker that waits for its turn."""

    activity: Activity
    results: Channel[Any]
    turn: threading.Lock = field(default_factory=threading.Lock)


_Pools = dict[int, tuple["weakref.ref[Member]", int]]
"""Pools and the number of their threads, by id."""


class ThreadBudget:
    """The turns of all worker threads of this process.

    Workers read ``is_scarce`` without the lock, once for each job: a stale value lets one more job
    run.
    """

    def __init__(self, num_cores: int | None = None) -> None:
        self.is_scarce = False
        """Whether jobs have to take turns."""
        self._num_cores = num_cores  # None = yet to be read
        # Re-entrant: a finalizer may end a pool on a thread that is inside one of the methods. So
        # the dictionaries are replaced and never changed, and may have one more pool that is gone.
        self._lock = threading.RLock()
        self._own = threading.local()  # the activity of the thread's own worker
        self._active: _Pools = {}
        self._resting: _Pools = {}  # oldest first
        self._limit = 0
        self._raised = 0  # the limit that cores and GIL had room for
        self._num_running = 0  # jobs that have a turn
        self._waiters: deque[_Waiter] = deque()
        self._last_end = 0.0
        self._probes: ProbeCounters | None = None
        self._last_look = 0.0

    def begin(self, pool: Member, num_workers: int) -> None:
        """Count a pool whose epoch begins, or whose number of workers changes."""
        with self._lock:
            self._resting = _without(self._resting, pool)
            self._active = {**self._active, id(pool): (weakref.ref(pool), num_workers)}
            self._decide()

    def end(self, pool: Member) -> None:
        """Stop counting a pool. Never blocks."""
        with self._lock:
            self._resting = _without(self._resting, pool)
            if id(pool) in self._active:
                self._active = _without(self._active, pool)
                self._decide()

    def rest(self, pool: Member, num_workers: int) -> None:
        """Count a pool as resting: its epoch is over, and its threads may be let go."""
        self.end(pool)
        with self._lock:
            self._resting = {**self._resting, id(pool): (weakref.ref(pool), num_workers)}
            surplus = self._surplus()
        for each in surplus:  # without the lock: each takes its own
            each.retire()

    def _surplus(self) -> list[Member]:
        """Take the pools that have rested longest off the list, until few enough threads rest."""
        resting = _alive(self._resting)
        sizes = [size for _, size in resting]
        num_resting, most, surplus = sum(sizes), max(_MOST_RESTING, *sizes), []
        for pool, size in resting:
            if num_resting <= most:
                break
            num_resting -= size
            surplus.append(pool)
            self._resting = _without(self._resting, pool)
        return surplus

    def _decide(self) -> None:
        """Decide whether jobs take turns. The lock is held."""
        if self._num_cores is None:
            self._num_cores = max(1, int(Limits.of_this_machine().num_cores))
        active = _alive(self._active)
        sizes = [size for _, size in active]
        least = max(self._num_cores, *sizes, 0)
        self._limit = max(least, min(self._raised, sum(sizes)))
        was_scarce, self.is_scarce = self.is_scarce, sum(sizes) > least
        if self.is_scarce and not was_scarce:
            self._last_end, self._probes = monotonic(), None
            for pool, _ in active:
                for activity in pool.activities:
                    self._count_running(activity)
        self._give_turns()

    def _count_running(self, activity: Activity) -> None:
        """Count a job that began while there were enough turns. The lock is held."""
        if activity.job is None or activity.has_turn:
            return
        activity.has_turn = True
        self._num_running += 1
        # The worker clears its job first and looks for its turn then, so one of the two sees the
        # other.
        if activity.job is None:
            self.leave(activity)

    def belongs_to(self, activity: Activity) -> None:
        """Note the activity of the calling thread's worker."""
        self._own.activity = activity

    def enter(self, activity: Activity, results: Channel[Any]) -> None:
        """Take a turn, before a job begins whose batch goes to ``results``; block while there is
        none.

        Raises: ChannelClosed: ``results`` was closed meanwhile.
        """
        waiter = _Waiter(activity, results)
        with self._lock:
            if activity.has_turn:
                return
            if self._num_running < self._limit or not self.is_scarce:
                activity.has_turn = True
                self._num_running += 1
                return
            waiter.turn.acquire()
            self._waiters.append(waiter)
        try:
            # Enlisted first, looked second: close() either finds the waiter or is seen here.
            while not results.closed and not waiter.turn.acquire(timeout=_LOOK_SECONDS):
                self._look()
        finally:
            self._strike_off(waiter)
        if results.closed:
            self.leave(activity)
            raise ChannelClosed

    def leave(self, activity: Activity) -> None:
        """Give a turn back, if the worker has one."""
        with self._lock:
            if activity.has_turn:
                activity.has_turn = False
                self._num_running -= 1
                self._last_end = monotonic()
                self._give_turns()

    def lend(self) -> None:
        """Give the calling thread's turn away, if it has one: its job waits for another loader.

        The job goes on without one: to wait for a turn within a job might never end.
        """
        activity: Activity | None = getattr(self._own, "activity", None)
        if activity is not None and activity.has_turn:
            self.leave(activity)

    def close(self, results: Channel[Any]) -> None:
        """Wake the workers that wait for a turn to fill this channel, which is closed. Never
        blocks."""
        if self._waiters:
            with self._lock:
                for waiter in tuple(self._waiters):
                    if waiter.results is results and self._strike_off(waiter):
                        waiter.turn.release()

    def _strike_off(self, waiter: _Waiter) -> bool:
        """Take a waiter off the list; return whether it was there."""
        with self._lock:
            try:
                self._waiters.remove(waiter)
            except ValueError:
                return False
        return True

    def _give_turns(self, more: int = 0) -> None:
        """Let waiting workers go on, as many as may run. The lock is held."""
        most = self._limit if self.is_scarce else self._num_running + len(self._waiters)
        while self._waiters and self._num_running < most + more:
            try:
                waiter = self._waiters.popleft()
            except IndexError:  # a finalizer struck it off just now
                return
            waiter.activity.has_turn = True
            self._num_running += 1
            waiter.turn.release()

    def _look(self) -> None:
        """Raise the limit where cores and GIL have room; let one more run where nothing ends."""
        now, readings = monotonic(), None
        if now - self._last_look >= _LOOK_SECONDS:
            # Without the lock: the probe has one of its own, and a finalizer that wants this one
            # may run on a thread that holds that.
            readings = probe_counters()
        with self._lock:
            if readings is not None and now - self._last_look >= _LOOK_SECONDS:
                self._last_look, before, self._probes = now, self._probes, readings
                if before is not None:
                    has_room = _has_room(before, readings, self._num_cores or 1)
                    self._raised = 2 * self._limit if has_room else 0
                    self._decide()
            if now - self._last_end >= _STUCK_SECONDS:
                self._last_end = now
                self._give_turns(more=max(0, self._num_running - self._limit) + 1)


def _alive(pools: _Pools) -> list[tuple[Member, int]]:
    return [(pool, size) for found, size in pools.values() if (pool := found()) is not None]


def _without(pools: _Pools, pool: Member) -> _Pools:
    pools = pools.copy()
    pools.pop(id(pool), None)
    return pools


def _has_room(before: ProbeCounters, after: ProbeCounters, num_cores: int) -> bool:
    found = probes_between(before, after)
    used, gil = found.cores_used, found.gil_seconds
    if used is None or used >= _ROOM * num_cores or found.switch_interval is None:
        return False
    if gil is None:
        return found.own_gil or not _ONE_CORE[0] <= used <= _ONE_CORE[1]
    return gil < _GIL_TAKEN * found.switch_interval


budget = ThreadBudget()


if hasattr(os, "register_at_fork"):
    # The child has none of the threads, and the lock may be held.
    os.register_at_fork(after_in_child=lambda: budget.__init__())  # type: ignore[misc]  # as if made anew
