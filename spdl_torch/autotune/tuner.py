"""The tuner: turns windows of a run into changes of its stages' concurrency, without
a thread of its own.

The busiest stage gets half as many threads more. The window after that shows whether the consumer
got faster, by more than the noise. If not, the step is undone and the stage is left alone, for a
reason that is logged.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Generator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import TYPE_CHECKING, Any

from ..machine.readings import Probes, is_taken
from ..observe.verdict.causes import INPUT_BOUND, RUN_DELAY

if TYPE_CHECKING:
    from ..engine.statistics import PipelineStats, StageStats

_ALIKE_WINDOWS = 3
"""The consecutive windows in which there is nothing to do, or the speed is another, before the
tuner acts on it."""

_BUSY = 0.75
"""The busy share below which a stage holds nothing back (prototype: 93 to 99 % of the
optimum)."""

_LEAST_HEADROOM = 1.03
"""The CPU headroom below which the cores count as used up."""

_STEP = 1.5
"""The factor of a stage's threads in a step."""

_LEAST_GAIN = 0.02
_EXTRA_WINDOWS = 2
"""The extra windows for a step that may have gained, but within the noise."""

_DRIFT = 0.20

_PAUSE = 3.0
"""A part in which the consumer's own time per item is this many times the usual is left out: it was
doing something else (validation, a checkpoint)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """The bounds that tuning must not exceed."""

    threads: int
    """The most threads of all tuned stages together."""
    cores: float
    """The most CPU seconds per second that the stages may use."""
    memory_bytes: int | None = None
    """The most bytes in flight; None = no bound."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """A period of a run without a change, or a part of one."""

    stats: PipelineStats
    num_items: int
    """The number of items that the consumer took."""
    tunable: Set[str] = frozenset()
    """The names of the stages whose concurrency may be changed."""
    noise: float = 0.0
    """The standard error of ``rate``, relative to it."""
    probes: Probes = field(default_factory=Probes)
    memory_bytes: int | None = None
    """The most bytes in flight with the present settings; None = unknown."""

    @property
    def rate(self) -> float:
        """Items a second."""
        return self.num_items / self.stats.elapsed

    @property
    def own_seconds(self) -> float:
        """The time in which the consumer did not wait."""
        return (self.stats.elapsed_ns - self.stats.waited_ns) / 1e9

    @property
    def free(self) -> dict[str, StageStats]:
        """The stages that may be changed, by name."""
        return {stage.name: stage for stage in self.stats.stages if stage.name in self.tunable}

    @property
    def busiest(self) -> StageStats | None:
        """The stage whose threads wait the least; None = there is no stage."""
        return max(self.stats.stages, key=_busy_ratio, default=None)

    def and_then(self, later: Window) -> Window:
        """Merge two windows with equal settings."""
        return replace(
            later,
            stats=self.stats + later.stats,
            num_items=self.num_items + later.num_items,
            noise=math.hypot(self.noise, later.noise) / 2,
        )


def window_of(parts: Sequence[Window], **others: Any) -> Window:
    """Merge parts into a window, without those in which the consumer paused. ``others``: fields of
    the window that are of no part."""
    kept = _without_pauses(parts)
    whole, rates = reduce(Window.and_then, kept), [part.rate for part in kept]
    noise = 0.5 / max(1, whole.num_items)  # one item more or less
    if len(rates) > 1 and whole.num_items:
        error = statistics.stdev(rates) / math.sqrt(len(rates))
        noise = math.hypot(noise, error / statistics.fmean(rates))
    return replace(whole, noise=noise, **others)


def _without_pauses(parts: Sequence[Window]) -> Sequence[Window]:
    own = [part.own_seconds / part.num_items for part in parts if part.num_items]
    if len(own) < 3:
        return parts
    longest = _PAUSE * statistics.median(own)
    kept = [part for part in parts if part.own_seconds <= longest * max(1, part.num_items) + 0.1]
    return kept if any(part.num_items for part in kept) else parts


@dataclass(frozen=True, slots=True)
class Decision:
    """A change, or why there is none, with what was measured before and after it."""

    stage: str
    from_count: int
    to_count: int
    before: float
    """Items a second."""
    after: float
    """Items a second with the change; if it was reverted, while it held."""
    reason: str
    """``gained``; undone for ``noise``, ``gil``, ``io-limit``; undone or not tried for ``cpu``,
    ``memory``; not tried for ``max``; ``drift``; at the end: ``consumer``, ``source``, or one of
    those before."""
    timestamp: float = field(default_factory=time.time)
    """Seconds since 1970."""

    def as_details(self) -> dict[str, Any]:
        """Return the stored form: ``{t, stage, from, to, before, after, reason}``."""
        counts = {"stage": self.stage, "from": self.from_count, "to": self.to_count}
        rates = {"before": self.before, "after": self.after}
        return {"t": self.timestamp, **counts, **rates, "reason": self.reason}

    def __str__(self) -> str:
        rates = f"{self.before:.1f} -> {self.after:.1f} items/s"
        return f"{self.stage}: {self.from_count} -> {self.to_count}, {rates}: {self.reason}"


_Change = tuple[str, int]
"""A stage and its new concurrency."""

_Steps = Generator[_Change | None, Window, Window]
"""Yields changes, each for a window that was taken after the change before; ends with the last."""


class Tuner:
    """Give it window after window by :meth:`step`; it never changes more than ``bounds`` allow."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.is_settled = False
        """Whether nothing is left to gain; the tuner then watches for changes."""
        self._decisions: list[Decision] = []  # of the present step
        self._steps = self._tune()
        next(self._steps)

    def step(self, window: Window) -> tuple[_Change | None, list[Decision]]:
        """Return what to do after a window without a change: a stage and its new concurrency, or
        None; and the decisions about earlier steps, or the reason why there is no step."""
        self._decisions = []
        change = self._steps.send(window) if window.num_items else None
        return change, self._decisions

    def _tune(self) -> _Steps:
        window = yield None
        while True:
            window, reason = yield from self._search(window)
            self._decide_nothing(window, window.rate, reason)
            self.is_settled = True
            before, window = window, (yield from self._rest(window, reason))
            self.is_settled = False
            self._decide_nothing(window, before.rate, "drift")

    def _search(self, window: Window) -> Generator[_Change | None, Window, tuple[Window, str]]:
        """Take steps until nothing is left to gain; return the last window, and why."""
        frozen: dict[str, str] = {}  # stage -> why more threads there gain nothing
        num_alike = 0
        while True:
            bottleneck, why = _bottleneck(window, frozen)
            if bottleneck:
                count, why = self._more_threads(window, bottleneck)
                if not why:
                    num_alike = 0
                    window = yield from self._try(bottleneck, count, window, frozen)
                    continue
                frozen[bottleneck] = why
            num_alike += 1
            # Stages that are left alone stay so; how busy the others are may be chance.
            if why not in ("consumer", "source") or num_alike >= _ALIKE_WINDOWS:
                return window, why
            window = yield None

    def _try(self, name: str, count: int, before: Window, frozen: dict[str, str]) -> _Steps:
        """Give a stage more threads; take them back, and freeze it, unless that gains."""
        after = window = yield name, count
        for _ in range(_EXTRA_WINDOWS):
            gain, need = _gain_of(before, after)
            if not _LEAST_GAIN <= gain < need:
                break
            window = yield None  # it may have gained: look longer
            after = after.and_then(window)
        gain, need = _gain_of(before, after)
        fewer, more = before.free[name].concurrency, after.free[name].concurrency
        used, limit = after.memory_bytes or 0, self.bounds.memory_bytes
        rates = before.rate, after.rate
        if limit is not None and used > limit:
            reason = "memory"
        elif gain >= need:
            self._decisions.append(Decision(name, fewer, more, *rates, "gained"))
            return window
        else:
            reason = "noise" if gain >= _LEAST_GAIN else _cause_of(after, name)
        frozen[name] = reason
        self._decisions.append(Decision(name, more, fewer, *rates, reason))
        return (yield name, fewer)

    def _more_threads(self, window: Window, name: str) -> tuple[int, str]:
        """Return the stage's threads after a step; and why there is none: ``max``, ``cpu``,
        ``memory`` or ""."""
        bounds, free = self.bounds, window.free
        used = sum(stage.cpu_ns for stage in window.stats.stages) / window.stats.elapsed_ns
        if used * _LEAST_HEADROOM > bounds.cores:
            return 0, "cpu"
        count, most = free[name].concurrency, _most_threads(window, bounds)
        room = most - sum(stage.concurrency for stage in free.values())
        if room <= 0:
            return 0, "max" if most >= bounds.threads else "memory"
        return min(math.ceil(_STEP * count), count + room), ""

    def _rest(self, since: Window, reason: str) -> _Steps:
        """Change nothing until the data or the training step has changed."""
        num_alike = 0
        while num_alike < _ALIKE_WINDOWS:
            window = yield None
            noise = 4 * math.hypot(window.noise, since.noise)
            has_drifted = abs(window.rate / since.rate - 1) > max(_DRIFT, noise)
            is_waiting = window.stats.consumer_wait_ratio > INPUT_BOUND
            waits_again = is_waiting and (reason == "consumer" or has_drifted)
            num_alike = num_alike + 1 if waits_again else 0
        return window

    def _decide_nothing(self, window: Window, before: float, reason: str) -> None:
        """Note why nothing changes, for the busiest stage."""
        busiest = window.busiest
        name, count = ("", 0) if busiest is None else (busiest.name, busiest.concurrency)
        self._decisions.append(Decision(name, count, count, before, window.rate, reason))


def _bottleneck(window: Window, frozen: Mapping[str, str]) -> tuple[str, str]:
    """Return the stage that holds the others back and may get threads; or "", and why none."""
    if window.stats.consumer_wait_ratio <= INPUT_BOUND:
        return "", "consumer"
    busiest = window.busiest
    if busiest is None or _busy_ratio(busiest) < _BUSY:
        return "", "source"
    # Where it is not frozen, its concurrency is not ours to change.
    why = frozen.get(busiest.name, "max")
    busy = {name: _busy_ratio(s) for name, s in window.free.items() if name not in frozen}
    slowest = max(busy, key=lambda name: busy[name], default="")
    return (slowest if slowest and busy[slowest] >= _BUSY else ""), why


def _gain_of(before: Window, after: Window) -> tuple[float, float]:
    """Return how much faster the consumer has become, and how much shows that it has."""
    noise = math.hypot(before.noise, after.noise)
    return after.rate / before.rate - 1, max(_LEAST_GAIN, 2 * noise)


def _busy_ratio(stage: StageStats) -> float:
    """Return the share of the threads' time in which they waited neither for items nor for room:
    inside the op, or on the way there, where one may lose its core or the GIL as well.
    """
    return max(stage.busy_ratio, 1.0 - stage.wait_in_ratio - stage.wait_out_ratio)


def _most_threads(window: Window, bounds: Bounds) -> int:
    """Return the limit on tunable threads, by number and by the memory each adds in flight."""
    now = sum(stage.concurrency for stage in window.free.values())
    used, limit = window.memory_bytes, bounds.memory_bytes
    if not used or limit is None:
        return bounds.threads
    return min(bounds.threads, max(now if used <= limit else 0, int(now * limit / used)))


def _cause_of(window: Window, name: str) -> str:
    """Return why more threads gained nothing."""
    probes, stage = window.probes, window.free[name]
    if probes.gil_seconds is not None and is_taken(probes.gil_seconds, probes.switch_interval):
        return "gil"
    if probes.run_delay_ratio is not None and probes.run_delay_ratio >= RUN_DELAY:
        return "cpu"
    return "io-limit" if stage.cpu_ns < 0.5 * stage.busy_ns else "cpu"
