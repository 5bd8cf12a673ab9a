"""Merges of several queues into one: of pipelines, and of the ends of path variants."""

from __future__ import annotations

import functools
import threading
from abc import ABC, abstractmethod
from contextlib import ExitStack
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from ..channel.channel import Channel
from ..channel.sentinels import ABSENT, EPOCH_END
from ..channel.waits import ChannelClosed, EndOfChannel
from ..failures import attach_note
from ..hooks.checks import enter_queue_hook
from ..stage.source import as_exception
from .forward import forward

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..hooks.stage_info import StageInfo
    from ..hooks.stats_queue import StatsQueue
    from ..recorder.rings import Ring
    from ..stage.tally import StageOwner


class Merge(ABC):
    """A node with several inlets and one outlet.

    Stop: closing the queues ends every wait. A merge that ends before its inlets, because nobody
    takes from its outlet any more, closes them, so that no thread before it waits for room.
    """

    def __init__(
        self,
        info: StageInfo,
        inlets: Sequence[StatsQueue],
        outlet: StatsQueue,
        rings: Sequence[Ring],
        owner: StageOwner,
    ) -> None:
        self.info = info
        self.inlets = inlets
        self.outlet = outlet
        self._rings = rings
        self._owner = owner
        self._hooks = ExitStack()
        self._lock = threading.Lock()  # guards the count of threads that have not ended
        self._num_present = len(rings)

    def enter(self) -> None:
        """Enter the hook of the queue, before any thread starts."""
        enter_queue_hook(self._hooks, self.outlet)

    def thread_targets(self) -> list[tuple[str, Callable[[], None]]]:
        """Return name and target of each of its threads."""
        return [
            (f"{self.info.stage_name}-{number}", functools.partial(self._run, number))
            for number in range(len(self._rings))
        ]

    def request_stop(self) -> None:
        """End the waits that closed queues do not end: none here. Never blocks."""
        return

    @abstractmethod
    def merge(self, number: int, ring: Ring) -> None:
        """Do the work of the thread of that number; EndOfChannel and ChannelClosed end it."""

    def close_inlets(self, number: int) -> None:
        """Close the inlets of that thread, which takes no more."""
        for inlet in self.inlets:
            inlet.close()

    def _run(self, number: int) -> None:
        try:
            self.merge(number, self._rings[number])
        except EndOfChannel:
            pass
        except ChannelClosed:
            self.close_inlets(number)
        except BaseException as error:
            attach_note(error, f"in {self.info.stage_name!r}")
            self._owner.fail(f"{self.info.stage_name!r} raised", [as_exception(error)])
            self.close_inlets(number)
        finally:
            self._leave()

    def _leave(self) -> None:
        with self._lock:  # exactly one thread sees itself as the last, and ends the outlet
            self._num_present -= 1
            is_last = not self._num_present
        if not is_last:
            return
        try:
            self._hooks.close()
        except Exception as error:
            self._owner.fail("a queue's stage_hook raised", [error])
        finally:
            self.outlet.finish()


class ArrivalMerge(Merge):
    """Items in the order of their arrival: one thread for each inlet. An epoch ends when it has
    ended at every inlet.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._barrier = _EpochBarrier(len(self.inlets), self._end_epoch)

    def merge(self, number: int, ring: Ring) -> None:
        """Pass on the items of one inlet."""
        try:
            forward(self.inlets[number], self.outlet, ring, self._barrier.arrive)
        finally:
            self._barrier.close()

    def close_inlets(self, number: int) -> None:
        """Close this thread's inlet; the other threads close theirs."""
        self.inlets[number].close()

    def request_stop(self) -> None:
        """End the threads' waits for each other. Never blocks."""
        self._barrier.close()

    def _end_epoch(self) -> None:
        self.outlet.put(EPOCH_END)


class BatchMerge(Merge):
    """One list from the parts into which a list was divided: one thread, which takes a part from
    each inlet in turn. Paths put a sentinel where they have no part, so that parts of one list
    always meet.
    """

    keeps_places = False
    """Whether an empty list leaves a sentinel in its place: path variants nested in others."""

    def merge(self, number: int, ring: Ring) -> None:
        """Put lists together again, the parts in the order of the paths."""
        outlet = self.outlet
        since_ns = ring.begin()
        while True:
            parts = [inlet.get_numbered() for inlet in self.inlets]
            if any(part is EPOCH_END for _, part in parts):
                assert all(part is EPOCH_END for _, part in parts), "guaranteed by the router"
                outlet.put(EPOCH_END)
                continue
            started_ns = perf_counter_ns()
            whole = _joined([part for _, part in parts])
            ended_ns, output = perf_counter_ns(), -1
            if whole or self.keeps_places:
                output = outlet.put(whole or ABSENT)
            done_ns = perf_counter_ns()
            if done_ns - since_ns >= ring.shortest_ns:
                ring.add(
                    since_ns,
                    started_ns,
                    ended_ns,
                    done_ns,
                    -1,
                    parts[0][0],
                    output,
                    self.inlets[0],
                    outlet,
                )
            since_ns = done_ns


def _joined(parts: Sequence[Any]) -> list[Any]:
    whole: list[Any] = []
    for path, part in enumerate(parts):
        if part is not ABSENT:
            try:
                whole.extend(part)
            except TypeError as error:
                attach_note(error, f"path {path} must return a list, got {type(part).__name__}")
                raise
    return whole


class _EpochBarrier:
    """The barrier at which the threads of a merge wait for each other at the end of an epoch.

    A thread leaves only if the run fails or stops. Then this epoch will never be complete, and
    the others leave too.
    """

    def __init__(self, count: int, when_all_are_there: Callable[[], None]) -> None:
        # Guards the list of those that wait, and whether the barrier is closed; never held in a
        # wait.
        # Re-entrant: close() may come from a finalizer on a thread that holds it.
        self._lock = threading.RLock()
        self._count = count
        self._is_over = False
        self._waiting: list[Channel[None]] = []
        self._when_all_are_there = when_all_are_there

    def arrive(self) -> None:
        """Wait for the others. Raises: ChannelClosed: one of them has left, or the run stops."""
        # Each thread waits at a channel of its own. At a shared one, a fast thread that has come to
        # the end of the next epoch already could take what was put to wake a slow one.
        ticket = Channel[None](1)
        with self._lock:
            if self._is_over:
                raise ChannelClosed
            self._waiting.append(ticket)
            is_last = len(self._waiting) == self._count
        if is_last:
            # Before the others go on, so that the sentinel precedes their items. They stay on the
            # list meanwhile: this call may wait for room, and a close() that ends it must end
            # their waits too.
            self._when_all_are_there()
            with self._lock:
                waiting, self._waiting = self._waiting, []
            for each in waiting:
                each.put(None)
        ticket.get()

    def close(self) -> None:
        """Let everyone who waits, or arrives later, raise ChannelClosed. Never blocks."""
        with self._lock:
            self._is_over = True
            others, self._waiting = self._waiting, []
        for each in others:
            each.close()
