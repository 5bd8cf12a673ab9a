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
from collections.abc import Sequence, Set
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


class Tuner:
    """Give it window after window by :meth:`step`; it never changes more than ``bounds`` allow."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        # The stage that has got more threads, the window before, and those since.
        self._trial: tuple[str, Window, list[Window]] | None = None
        self._decisions: list[Decision] = []  # of the present step
        self._begin()

    def _begin(self) -> None:
        """Forget what was tried."""
        self._frozen: dict[str, str] = {}  # stage -> why more threads there gain nothing
        self._num_alike = 0
        self._resting: tuple[Window, str] | None = None  # since when, and why

    @property
    def is_settled(self) -> bool:
        """Whether nothing is left to gain; the tuner then watches for changes."""
        return self._resting is not None

    def step(self, window: Window) -> tuple[_Change | None, list[Decision]]:
        """Return what to do after a window without a change: a stage and its new concurrency, or
        None; and the decisions about earlier steps, or the reason why there is no step."""
        self._decisions = []
        change: _Change | None = None
        if window.num_items:
            if self._trial is not None:
                change = self._judge(*self._trial, window)
            elif self._resting is not None:
                change = self._rest(*self._resting, window)
            else:
                change = self._propose(window)
        return change, self._decisions

    def _propose(self, window: Window) -> _Change | None:
        bottleneck, why = self._bottleneck(window)
        if bottleneck:
            count, why = self._more_threads(window, bottleneck)
            if not why:
                self._num_alike = 0
                self._trial = bottleneck, window, []
                return bottleneck, count
            self._frozen[bottleneck] = why
        self._num_alike += 1
        # Stages that are left alone stay so; how busy the others are may be chance.
        if why in ("consumer", "source") and self._num_alike < _ALIKE_WINDOWS:
            return None
        self._num_alike = 0
        self._resting = window, why
        self._decide_nothing(window, window.rate, why)
        return None

    def _bottleneck(self, window: Window) -> tuple[str, str]:
        """Return the stage that holds the others back and may get threads; or "", and why none."""
        if window.stats.consumer_wait_ratio <= INPUT_BOUND:
            return "", "consumer"
        busiest = window.busiest
        if busiest is None or _busy_ratio(busiest) < _BUSY:
            return "", "source"
        # Where it is not frozen, its concurrency is not ours to change.
        why = self._frozen.get(busiest.name, "max")
        busy = {n: _busy_ratio(s) for n, s in window.free.items() if n not in self._frozen}
        slowest = max(busy, key=lambda name: busy[name], default="")
        return (slowest if slowest and busy[slowest] >= _BUSY else ""), why

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

    def _judge(
        self, name: str, before: Window, windows: list[Window], window: Window
    ) -> _Change | None:
        """Keep the threads that a stage has got, and look for the next step, or take them back."""
        windows.append(window)
        after = reduce(Window.and_then, windows)
        gain, noise = after.rate / before.rate - 1, math.hypot(before.noise, after.noise)
        need = max(_LEAST_GAIN, 2 * noise)
        if _LEAST_GAIN <= gain < need and len(windows) <= _EXTRA_WINDOWS:
            return None  # it may have gained: look longer
        self._trial = None
        fewer, more = before.free[name].concurrency, after.free[name].concurrency
        used, limit = after.memory_bytes or 0, self.bounds.memory_bytes
        rates = before.rate, after.rate
        if limit is not None and used > limit:
            reason = "memory"
        elif gain >= need:
            self._decisions.append(Decision(name, fewer, more, *rates, "gained"))
            return self._propose(window)
        else:
            reason = "noise" if gain >= _LEAST_GAIN else _cause_of(after, name)
        self._frozen[name] = reason
        self._decisions.append(Decision(name, more, fewer, *rates, reason))
        return name, fewer

    def _decide_nothing(self, window: Window, before: float, reason: str) -> None:
        """Note why nothing changes, for the busiest stage."""
        busiest = window.busiest
        name, count = ("", 0) if busiest is None else (busiest.name, busiest.concurrency)
        self._decisions.append(Decision(name, count, count, before, window.rate, reason))

    def _rest(self, since: Window, reason: str, window: Window) -> _Change | None:
        """Look for steps again if the data or the training step has changed."""
        noise = 4 * math.hypot(window.noise, since.noise)
        has_drifted = abs(window.rate / since.rate - 1) > max(_DRIFT, noise)
        is_waiting = window.stats.consumer_wait_ratio > INPUT_BOUND
        waits_again = is_waiting and (reason == "consumer" or has_drifted)
        self._num_alike = self._num_alike + 1 if waits_again else 0
        if self._num_alike < _ALIKE_WINDOWS:
            return None
        self._begin()
        self._decide_nothing(window, since.rate, "drift")
        return self._propose(window)


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
