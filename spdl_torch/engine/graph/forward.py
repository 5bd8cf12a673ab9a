"""Forward items from one queue to the next: the work of the sink's thread and of a merge's."""

from __future__ import annotations

from time import perf_counter_ns
from typing import TYPE_CHECKING, NoReturn

from ..channel.sentinels import EPOCH_END

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..hooks.stats_queue import StatsQueue
    from ..recorder.rings import Ring


def forward(
    before: StatsQueue,
    after: StatsQueue,
    ring: Ring,
    at_epoch_end: Callable[[], None] | None = None,
) -> NoReturn:
    """Pass items on until one of the queues ends the wait.

    at_epoch_end: called instead of forwarding the end of an epoch.
    Raises: EndOfChannel, ChannelClosed.
    """
    since_ns = ring.begin()
    while True:
        number, item = before.get_numbered()
        if item is EPOCH_END and at_epoch_end is not None:
            at_epoch_end()
            continue
        got_ns = perf_counter_ns()
        output = after.put(item)
        item = None  # else it would stay alive while this thread waits
        done_ns = perf_counter_ns()
        if done_ns - since_ns >= ring.shortest_ns:
            ring.add(since_ns, got_ns, got_ns, done_ns, -1, number, output, before, after)
        since_ns = done_ns
