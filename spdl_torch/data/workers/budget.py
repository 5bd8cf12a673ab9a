"""One budget of threads for all loaders of a process.

Each loader has as many worker threads as it was asked to have. Where the jobs of several loaders
want to run at once, as many run as there are cores. A loader is never held up while no other one
has a job, as where training waits for validation. Workers that only wait for storage take neither a
core nor the GIL, so the limit doubles as long as both have room, and is halved as long as they
have none.

Beyond a number, threads of persistent loaders whose epoch is over are let go, those that have
rested longest first. Their workers stay, and get new threads with the next epoch.

A job waits for its permit before it begins, never within. A worker that itself waits for another
loader's batch gives its permit away. Whatever else workers wait for, after a second in which no job
ends, one more may run: nothing waits forever.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol

from ...engine.channel.waits import ChannelClosed
from ...machine import gil
from ...machine.limits import whole_cores
from ...machine.probes import probe_counters

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...engine.channel.channel import Channel
    from ...machine.probes import ProbeCounters
    from .activity import Activity, Permits

_LOOK_SECONDS = 0.6
"""The time between two checks of the cores: the probe of the GIL needs half a second."""
_LONGEST_WINDOW = 3
"""With so many such times between two checks, cores may have been idle for lack of jobs."""
_STUCK_SECONDS = 1.0
"""The time in which no job ends, after which one more may run."""
_ROOM = 0.7
"""The share of the cores below which there is room for more."""
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


class _Waiter:
    """A worker that waits for its permit."""

    __slots__ = ("activity", "asleep", "results")

    def __init__(self, activity: Activity, results: Channel[Any]) -> None:
        self.activity = activity
        self.results = results
        self.asleep = threading.Lock()

    def wake(self) -> None:
        """Let it see what has changed: it has a permit, is the last, or its channel is closed."""
        if self.asleep.locked():  # else it was woken before, and has yet to look
            self.asleep.release()


_Pools = dict[int, tuple["weakref.ref[Member]", int]]
"""Pools and the number of their threads, by id."""


class ThreadBudget:
    """The permits of all worker threads of this process.

    Workers read ``is_scarce`` without the lock, once for each job: a stale value lets one more job
    run.
    """

    def __init__(self, num_cores: int | None = None) -> None:
        self.is_scarce = False
        """Whether jobs need permits."""
        self._num_cores = num_cores  # None = yet to be read
        # Re-entrant: a finalizer may end a pool on a thread that is inside one of the methods. So
        # the dictionaries are replaced and never changed, and may still hold a pool that is gone.
        self._lock = threading.RLock()
        self._own = threading.local()  # the activity of the thread's own worker
        self._active: _Pools = {}
        self._resting: _Pools = {}  # oldest first
        self._limit = 0
        self._raised = 0  # the limit that cores and GIL had room for
        self._num_running = 0  # jobs that have a permit, of all pools
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
        """Decide whether jobs need permits. The lock is held."""
        if self._num_cores is None:
            self._num_cores = whole_cores()
        active = _alive(self._active)
        num_workers = sum(size for _, size in active)
        self._limit = max(self._num_cores, min(self._raised, num_workers))
        was_scarce = self.is_scarce
        self.is_scarce = len(active) > 1 and num_workers > self._num_cores
        if self.is_scarce and not was_scarce:
            self._last_end, self._probes = monotonic(), None
            for pool, _ in active:
                for activity in pool.activities:
                    self._count_running(activity)
        self.give_permits()

    def _count_running(self, activity: Activity) -> None:
        """Count a job that began while none was needed. The lock is held."""
        if activity.job is None or activity.has_permit:
            return
        self._let_run(activity)
        # The worker clears its job first and then checks for a permit, so one of the two sees the
        # other.
        if activity.job is None:
            self.leave(activity)

    def belongs_to(self, activity: Activity) -> None:
        """Note the activity of the calling thread's worker."""
        self._own.activity = activity

    def enter(self, activity: Activity, results: Channel[Any]) -> None:
        """Take a permit, before a job begins whose batch goes to ``results``; block while there is
        none.

        Raises: ChannelClosed: ``results`` was closed meanwhile.
        """
        waiter = _Waiter(activity, results)
        if monotonic() - self._last_look >= _LOOK_SECONDS:
            self._look()  # a waiting worker does, too; but waits may be short, or none
        with self._lock:
            if activity.has_permit:
                return
            if not self.is_scarce or self._has_permit_for(activity.permits, self._limit):
                self._let_run(activity)
                return
            waiter.asleep.acquire()
            activity.permits.num_waiting += 1
            self._waiters.append(waiter)
        try:
            # Enlisted first, looked second: close() either finds the waiter or is seen here.
            while not (results.closed or activity.has_permit):
                # Of thousands that wait, only the one that will wait longest checks, for all.
                is_last = _last_of(self._waiters) is waiter
                if not waiter.asleep.acquire(timeout=_LOOK_SECONDS if is_last else -1):
                    self._look()
        finally:
            self._strike_off(waiter)
        if results.closed:
            self.leave(activity)
            raise ChannelClosed

    def leave(self, activity: Activity) -> None:
        """Give a permit back, if the worker has one."""
        with self._lock:
            if activity.has_permit:
                activity.has_permit = False
                activity.permits.num_running -= 1
                self._num_running -= 1
                self._last_end = monotonic()
                self.give_permits()

    def lend(self) -> None:
        """Give the calling thread's permit away, if it has one: its job waits for another loader.

        The job goes on without one: waiting for a permit within a job might never end.
        """
        activity: Activity | None = getattr(self._own, "activity", None)
        if activity is not None and activity.has_permit:
            self.leave(activity)

    def close(self, results: Channel[Any]) -> None:
        """Wake the workers that wait for a permit to fill this channel, which is closed. Never
        blocks."""
        if self._waiters:
            with self._lock:
                for waiter in tuple(self._waiters):
                    if waiter.results is results and self._strike_off(waiter):
                        waiter.wake()

    def _strike_off(self, waiter: _Waiter) -> bool:
        """Take a waiter off the list; return whether it was there."""
        with self._lock:
            was_last = _last_of(self._waiters) is waiter
            try:
                self._waiters.remove(waiter)
            except ValueError:
                return False
            waiter.activity.permits.num_waiting -= 1
            if was_last and (last := _last_of(self._waiters)) is not None:
                last.wake()
        return True

    def _has_permit_for(self, permits: Permits, most: int) -> bool:
        """Return whether one more job of a pool may run: fewer than ``most`` do, or all that run
        and wait are its own. The lock is held."""
        return self._num_running < most or (
            permits.num_running == self._num_running and permits.num_waiting == len(self._waiters)
        )

    def _let_run(self, activity: Activity) -> None:
        activity.has_permit = True
        activity.permits.num_running += 1
        self._num_running += 1

    def give_permits(self, more: int = 0) -> None:
        """Let waiting workers go on, as many as may run. The lock is held."""
        most = self._limit if self.is_scarce else self._num_running + len(self._waiters)
        while True:
            try:
                waiter = self._waiters[0]
                if not self._has_permit_for(waiter.activity.permits, most + more):
                    return
                # A finalizer may have struck it off just now.
                if self._strike_off(waiter):
                    self._let_run(waiter.activity)
                    waiter.wake()
            except IndexError:
                return

    def _look(self) -> None:
        """Raise the limit where cores and GIL have room, else lower it; let one more job run if
        none has ended for long."""
        with self._lock:
            now = monotonic()
            if (since_last := now - self._last_look) >= _LOOK_SECONDS:
                self._last_look, before = now, self._probes
                self._probes = probe_counters(run_delays=False)
                if before is not None and since_last < _LONGEST_WINDOW * _LOOK_SECONDS:
                    has_room = _has_room(before, self._probes, self._num_cores or 1)
                    self._raised = 2 * self._limit if has_room else self._limit // 2
                    self._decide()
            if now - self._last_end >= _STUCK_SECONDS:
                self._last_end = now
                self.give_permits(more=max(0, self._num_running - self._limit) + 1)


def _last_of(waiters: deque[_Waiter]) -> _Waiter | None:
    try:
        return waiters[-1]
    except IndexError:
        return None


def _alive(pools: _Pools) -> list[tuple[Member, int]]:
    return [(pool, size) for found, size in pools.values() if (pool := found()) is not None]


def _without(pools: _Pools, pool: Member) -> _Pools:
    pools = pools.copy()
    pools.pop(id(pool), None)
    return pools


def _has_room(before: ProbeCounters, after: ProbeCounters, num_cores: int) -> bool:
    from ...machine.readings import probes_between  # few programs are short of cores

    found = probes_between(before, after)
    used, waits = found.cores_used, found.gil_seconds
    if used is None or used >= _ROOM * num_cores:
        return False
    if waits is None:
        return found.own_gil or not gil.take_turns(used)
    return not gil.is_taken(waits, found.switch_interval)


budget = ThreadBudget()


if hasattr(os, "register_at_fork"):
    # The child has none of the threads, and the lock may be held.
    os.register_at_fork(after_in_child=lambda: budget.__init__())  # type: ignore[misc]  # as if made anew
