"""Routers, which branch one queue into several: the op chooses the path of each item.

The router runs as the op of any stage, with the same failures, hooks and statistics. The outlet of
that stage is a :class:`PathQueues`, which distributes its results.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..channel.sentinels import ABSENT, Sentinel
from ..definition.ops import OpKind, as_op
from ..stats.counters import QueueCounters

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..definition.specs import StageSpec
    from ..hooks.stats_queue import StatsQueue

Routed = tuple[int, Any] | list[list[Any]]
"""The path of an item, and the item; or the part of a list that each path gets."""


class PathQueues:
    """The outlet of a router: one queue for each path. The run closes the queues themselves."""

    def __init__(self, queues: Sequence[StatsQueue]) -> None:
        self._queues = queues

    def put(self, routed: Routed | Sentinel) -> int:
        """Put an item on its path, a part of a list on each, a sentinel on all.

        Blocks while there is no room. Returns the number, in its queue, of the last one put.
        """
        number = -1
        for queue, content in self._contents(routed):
            number = queue.put(content)
        return number

    async def aput(self, routed: Routed | Sentinel) -> int:
        """``put`` for a coroutine."""
        number = -1
        for queue, content in self._contents(routed):
            number = await queue.aput(content)
        return number

    def finish(self) -> None:
        """Finish every path: no more items."""
        for queue in self._queues:
            queue.finish()

    @property
    def closed(self) -> bool:
        """Whether the run stops, or a path takes no more items."""
        return any(queue.closed for queue in self._queues)

    def counters(self) -> QueueCounters:
        """Return the sums over the paths, but the mean of the time without an item."""
        each = [queue.counters() for queue in self._queues]
        return QueueCounters(
            elapsed_ns=max(c.elapsed_ns for c in each),
            num_put=sum(c.num_put for c in each),
            num_got=sum(c.num_got for c in each),
            put_wait=_added([c.put_wait for c in each]),
            get_wait=_added([c.get_wait for c in each]),
            empty_ns=sum(c.empty_ns for c in each) // len(each),
            peak_items=sum(c.peak_items for c in each),
        )

    def __len__(self) -> int:
        return sum(map(len, self._queues))

    def _contents(self, routed: Routed | Sentinel) -> list[tuple[StatsQueue, Any]]:
        if isinstance(routed, Sentinel):
            return [(queue, routed) for queue in self._queues]
        if isinstance(routed, tuple):
            return [(self._queues[routed[0]], routed[1])]
        return [(queue, part or ABSENT) for queue, part in zip(self._queues, routed, strict=True)]


Wait = tuple[int, int, tuple[int, ...]]


def _added(waits: list[Wait]) -> Wait:
    totals, num_open, histograms = zip(*waits, strict=True)
    return sum(totals), sum(num_open), tuple(map(sum, zip(*histograms, strict=True)))


def router_stage(spec: StageSpec) -> StageSpec:
    """Return the stage that runs the router of path variants."""
    call, kind = as_op(spec.op)
    if kind not in (OpKind.FUNCTION, OpKind.ASYNC_FUNCTION):
        raise TypeError(
            f"stage {spec.name!r}: router must be a function or an async function, got "
            f"{'an' if kind.value[0] == 'a' else 'a'} {kind.value}."
        )
    deal = _dealt_out if spec.batched else _directed
    route = _route if kind is OpKind.FUNCTION else _aroute
    op = functools.partial(route, call, functools.partial(deal, len(spec.paths)))
    return replace(spec, op=op, kind=kind, paths=())


def _route(router: Callable[[Any], Any], deal: Callable[[Any, Any], Routed], item: Any) -> Routed:
    return deal(item, router(item))


async def _aroute(
    router: Callable[[Any], Any], deal: Callable[[Any, Any], Routed], item: Any
) -> Routed:
    return deal(item, await router(item))


def _directed(num_paths: int, item: Any, index: Any) -> Routed:
    return _checked(index, num_paths), item


def _dealt_out(num_paths: int, items: Any, indices: Any) -> Routed:
    if len(indices) != len(items):
        raise ValueError(
            f"the router gave {len(indices)} indices for a list of {len(items)}; it must give one "
            "for each member."
        )
    parts: list[list[Any]] = [[] for _ in range(num_paths)]
    for item, index in zip(items, indices, strict=True):
        parts[_checked(index, num_paths)].append(item)
    return parts


def _checked(index: Any, num_paths: int) -> int:
    try:
        number = operator.index(index)
    except TypeError:
        raise TypeError(f"the router must return the index of a path, got {index!r}.") from None
    if not 0 <= number < num_paths:
        raise IndexError(
            f"the router returned path {number}, and there are {num_paths}: 0 to {num_paths - 1}."
        )
    return number
