"""The threads that each stage needs for a rate, by Little's law under bounds. Pure functions.

A stage that spends ``D`` thread-seconds on one item of the consumer's (calls per item times seconds
per call) passes on at most ``c / D`` items a second on ``c`` threads. So ``c = rate * D`` for all
of them, and while the threads do not suffice, one more goes to the slowest stage.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from .window import Bounds, Window

_BUSY = 0.75
"""The busy share below which a stage holds nothing back (prototype: 93 to 99 % of the
optimum)."""

_NEAR = 0.1
"""The distance from the busiest stage's share within which stages may hold others back too."""

_LEAST_HEADROOM = 1.03
"""The CPU headroom below which the cores count as used up."""

_SLACK = 1.2
"""The factor of spare threads over the consumer's need, because task times vary."""


@dataclass(frozen=True, slots=True)
class ThreadPlan:
    """Threads by stage, and the limit that rules out more of them."""

    counts: dict[str, int]
    """The new counts of the stages that change."""
    bottleneck: str
    """The stage that holds the others back."""
    bound: str = ""
    """The limit that was reached: ``max``, ``cpu`` or ``memory``; "" = none."""


def most_busy(window: Window, frozen: Collection[str]) -> str | None:
    """Return the stage that holds the others back; None if nothing is busy, or if what is busy must
    not be changed: it is ``frozen``, or not free (it has threads of another kind).
    """
    busiest = max((stage.busy_ratio for stage in window.stages), default=0.0)
    candidates = [
        stage
        for stage in window.stages
        if stage.is_free
        and stage.name not in frozen
        and stage.busy_ratio >= max(_BUSY, busiest - _NEAR)
    ]
    return max(candidates, key=lambda stage: stage.busy_ratio).name if candidates else None


def grow(
    window: Window, bounds: Bounds, frozen: Collection[str], factor: float
) -> ThreadPlan | None:
    """Plan threads for ``factor`` times the present rate, or the consumer's rate if that is less;
    None if no stage holds it back.
    """
    bottleneck = most_busy(window, frozen)
    if bottleneck is None or not window.num_items:
        return None
    before = {stage.name: stage.concurrency for stage in window.stages if stage.is_free}
    demands = {s.name: s.busy_seconds / window.num_items for s in window.stages if s.is_free}
    headroom = _cpu_headroom(window, bounds)
    if headroom < _LEAST_HEADROOM:
        return ThreadPlan({}, bottleneck, "cpu")
    rate = min(window.rate * min(factor, headroom), window.wanted_rate * _SLACK)
    most = most_threads(window, bounds)
    counts, bound = dict(before), ""
    while True:
        slowest = min(counts, key=lambda name: _capacity(counts[name], demands[name]))
        if counts == before:
            slowest = bottleneck  # add at least one there, whatever the estimate says
        elif slowest in frozen or _capacity(counts[slowest], demands[slowest]) >= rate:
            break  # threads added elsewhere would only wait for it
        if sum(counts.values()) >= most:
            bound = "max" if most >= bounds.threads else "memory"
            break
        counts[slowest] += 1
    return ThreadPlan({n: c for n, c in counts.items() if c != before[n]}, bottleneck, bound)


def shrink(window: Window, most: int) -> dict[str, int]:
    """Plan at most ``most`` threads, at least one per stage, taken where they are needed least;
    return the counts that change.
    """
    before = {stage.name: stage.concurrency for stage in window.stages if stage.is_free}
    demands = {s.name: s.busy_seconds for s in window.stages}
    counts = dict(before)
    while sum(counts.values()) > max(most, len(counts)):
        spare = [name for name in counts if counts[name] > 1]
        counts[max(spare, key=lambda name: _capacity(counts[name] - 1, demands[name]))] -= 1
    return {name: count for name, count in counts.items() if count != before[name]}


def _capacity(count: int, demand: float) -> float:
    """Return the items a second that ``count`` threads can pass on."""
    return count / demand if demand > 0 else math.inf


def _cpu_headroom(window: Window, bounds: Bounds) -> float:
    """Return the speedup that the cores allow the stages."""
    used = sum(stage.cpu_seconds for stage in window.stages) / max(1e-9, window.elapsed)
    return bounds.cores / used if used > bounds.cores * 0.05 else math.inf


def most_threads(window: Window, bounds: Bounds) -> int:
    """Return the limit on tunable threads, by number and by the memory each adds in flight."""
    used, limit, now = window.memory_bytes, bounds.memory_bytes, window.num_threads
    if used is None or limit is None or used <= 0:
        return bounds.threads
    return min(bounds.threads, max(now if used <= limit else 0, int(now * limit / used)))
