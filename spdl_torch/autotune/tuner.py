"""The tuner: turns windows of a run into changes of its stages' concurrency. No thread and no
clock.

One plan at a time is on trial: the window after it shows whether the consumer got faster, by more
than the noise. If not, it is reverted and the stage is left alone, for a reason that is logged.

A stage that spends ``D`` thread-seconds on one item of the consumer's passes on at most ``c / D``
items a second on ``c`` threads (Little's law). So a plan gives the slowest stage one more thread
until all stages pass on the rate that is aimed at. Of two equally slow stages one alone would gain
nothing: such a plan raises both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import TYPE_CHECKING

from ..machine.gil import is_taken
from .window import Decision

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .window import Bounds, StageLoad, Window

_ENOUGH_WAIT = 0.05
"""The share of waiting up to which training is not input-bound; TensorFlow's threshold."""

_CALM_WINDOWS = 3
_IDLE_WINDOWS = 2
"""The consecutive windows without a busy stage before the tuner acts on it."""

_BUSY = 0.75
"""The busy share below which a stage holds nothing back (prototype: 93 to 99 % of the
optimum)."""

_NEAR = 0.1
"""The distance from the busiest stage's share within which stages may hold others back too."""

_LEAST_HEADROOM = 1.03
"""The CPU headroom below which the cores count as used up."""

_SLACK = 1.2
"""The factor of spare threads over the consumer's need, because task times vary."""

_LEAST_GAIN = 0.02
_EXTRA_WINDOWS = 2
"""The extra windows for a trial that gained, but within the noise, and for its baseline."""

_NOISY = 0.05

_FIRST_FACTOR, _NEXT_FACTOR = 1.5, 2.0
"""The speedup that a step aims at: at first, and after a step that delivered it."""

_SHORT_SECONDS = 1e-3
"""The length below which calls may go faster on fewer threads, which contend less for the GIL."""

_DRIFT = 0.20
_DRIFT_WINDOWS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """The changes to make now."""

    counts: Mapping[str, int]
    """New concurrency by stage."""
    decisions: tuple[Decision, ...]
    """The decisions about earlier steps, or the reason why there is no step."""


@dataclass(slots=True)
class _Trial:
    stage: str
    """The stage that was changed; with others, if it was given more threads."""
    is_more: bool
    before: Window
    counts: dict[str, int]
    windows: list[Window] = field(default_factory=list)


class Tuner:
    """Give it window after window by :meth:`step`; it never changes more than ``bounds`` allow."""

    def __init__(self, bounds: Bounds, *, warm_up: int = 1) -> None:
        self.bounds = bounds
        self._warm_up = warm_up
        self._trial: _Trial | None = None
        self._decisions: list[Decision] = []  # of the present step
        self._begin()

    def _begin(self) -> None:
        """Forget what was tried."""
        self._factor = _FIRST_FACTOR
        self._frozen: dict[str, str] = {}  # stage -> why more threads there gain nothing
        self._no_fewer: set[str] = set()
        self._undecided: set[str] = set()  # stages whose trial gained, though within the noise
        self._baseline: list[Window] = []  # with the present numbers, while they are noisy
        self._num_calm = self._num_idle = self._num_drifted = 0
        self._resting: tuple[Window, str] | None = None  # since when, and why

    @property
    def is_settled(self) -> bool:
        """Whether nothing is left to gain; the tuner then watches for changes."""
        return self._resting is not None

    def step(self, window: Window) -> Step:
        """Return what to do after a window without a change."""
        self._decisions = []
        counts: dict[str, int] = {}
        if self._warm_up:
            self._warm_up -= 1
        elif window.num_items:
            counts = self._counts_after(window)
        return Step(counts=counts, decisions=tuple(self._decisions))

    def _counts_after(self, window: Window) -> dict[str, int]:
        if self._trial is not None:
            return self._judge(self._trial, window)
        used, limit = window.memory_bytes or 0, self.bounds.memory_bytes
        if limit is not None and used > limit and (counts := _fewer(window, self.bounds)):
            self._decide(counts, window, window, window, "memory")
            return counts  # at once, without a trial
        return self._propose(window) if self._resting is None else self._rest(window)

    def _propose(self, window: Window) -> dict[str, int]:
        if window.wait_ratio <= _ENOUGH_WAIT:
            self._num_calm += 1
            return self._settle(window, "consumer") if self._num_calm >= _CALM_WINDOWS else {}
        self._num_calm = 0
        bottleneck, why = self._bottleneck(window)
        if bottleneck:
            counts, bound = self._more_threads(window, bottleneck)
            if counts:
                self._baseline.append(window)
                before = reduce(_together, self._baseline)
                if before.noise > _NOISY and len(self._baseline) <= _EXTRA_WINDOWS:
                    return {}
                return self._try(_Trial(bottleneck, True, before, counts))
            self._frozen[bottleneck] = why = bound
        self._num_idle = self._num_idle + 1 if why == "source" else 0
        if 0 < self._num_idle < _IDLE_WINDOWS:
            return {}  # a single window may be an outlier
        fewer = max(filter(self._may_go_faster_on_fewer, window.stages), key=_busy, default=None)
        if fewer is not None:
            halved = {fewer.name: fewer.concurrency // 2}
            return self._try(_Trial(fewer.name, False, window, halved))
        return self._settle(window, why)

    def _bottleneck(self, window: Window) -> tuple[str, str]:
        """Return the stage that holds the others back and may get threads; or "", and why none."""
        busiest = max(window.stages, key=_busy, default=None)
        if busiest is None:
            return "", "source"
        least = max(_BUSY, busiest.busy_ratio - _NEAR)
        free = [s for s in window.stages if s.is_free and s.name not in self._frozen]
        if slow := [s for s in free if s.busy_ratio >= least]:
            return max(slow, key=_busy).name, ""
        # Where it is not frozen, its concurrency is not ours to change.
        otherwise = "max" if busiest.busy_ratio >= _BUSY else "source"
        return "", self._frozen.get(busiest.name, otherwise)

    def _more_threads(self, window: Window, bottleneck: str) -> tuple[dict[str, int], str]:
        """Plan threads for the present rate times the factor, or for the consumer's, if that is
        less; return the counts that change, and the limit that was reached: ``max``, ``cpu``,
        ``memory`` or "".
        """
        bounds, free = self.bounds, [stage for stage in window.stages if stage.is_free]
        used = sum(stage.cpu_seconds for stage in window.stages) / max(1e-9, window.elapsed)
        headroom = bounds.cores / used if used > bounds.cores * 0.05 else math.inf
        if headroom < _LEAST_HEADROOM:
            return {}, "cpu"
        rate = min(window.rate * min(self._factor, headroom), window.wanted_rate * _SLACK)
        before = {stage.name: stage.concurrency for stage in free}
        demands = {stage.name: stage.busy_seconds / window.num_items for stage in free}
        most, counts, bound = _most_threads(window, bounds), dict(before), ""
        while True:
            slowest = min(counts, key=lambda name: _capacity(counts[name], demands[name]))
            if counts == before:
                slowest = bottleneck  # add at least one there, whatever the estimate says
            elif slowest in self._frozen or _capacity(counts[slowest], demands[slowest]) >= rate:
                break  # threads added elsewhere would only wait for it
            if sum(counts.values()) >= most:
                bound = "max" if most >= bounds.threads else "memory"
                break
            counts[slowest] += 1
        return {n: c for n, c in counts.items() if c != before[n]}, bound

    def _may_go_faster_on_fewer(self, stage: StageLoad) -> bool:
        """Return whether its calls are short, or wait for the GIL or a core."""
        if not (stage.is_free and stage.concurrency > 1 and stage.num_tasks):
            return False
        is_short = stage.shares_gil and stage.task_seconds < _SHORT_SECONDS
        contends = self._frozen.get(stage.name) in ("gil", "cpu")
        return stage.name not in self._no_fewer and (is_short or contends)

    def _try(self, trial: _Trial) -> dict[str, int]:
        self._trial = trial
        self._baseline.clear()
        return trial.counts

    def _judge(self, trial: _Trial, window: Window) -> dict[str, int]:
        trial.windows.append(window)
        before, after = trial.before, reduce(_together, trial.windows)
        gain = after.rate / before.rate - 1
        noise = math.hypot(before.noise, after.noise)
        need = max(_LEAST_GAIN, 2 * noise)
        is_noisy = noise > _NOISY and gain > -need
        is_unclear = gain < need and (gain >= _LEAST_GAIN or is_noisy)
        if is_unclear and len(trial.windows) <= _EXTRA_WINDOWS:
            return {}  # it may have gained: look longer
        self._trial = None
        if gain >= need:
            if trial.is_more:
                self._factor = _NEXT_FACTOR if gain >= 0.6 * (self._factor - 1) else _FIRST_FACTOR
                self._no_fewer.discard(trial.stage)
            self._decide(trial.counts, before, before, after, "gained")
            return self._propose(window)
        if not trial.is_more:
            self._no_fewer.add(trial.stage)
            reason = "no gain"
        elif is_unclear and trial.stage not in self._undecided:
            self._undecided.add(trial.stage)  # it is tried once more
            reason = "noise"
        else:
            reason = self._frozen[trial.stage] = _cause_of(after, trial.stage)
        counts = {s.name: s.concurrency for s in before.stages if s.name in trial.counts}
        self._decide(counts, after, before, after, reason)
        return counts

    def _decide(
        self, counts: Mapping[str, int], then: Window, before: Window, after: Window, reason: str
    ) -> None:
        """Note the change to these counts from those of a window."""
        self._decisions += (
            Decision(s.name, s.concurrency, counts[s.name], before.rate, after.rate, reason)
            for s in then.stages
            if s.name in counts
        )

    def _decide_nothing(self, window: Window, before: float, reason: str) -> None:
        """Note why nothing changes, for the busiest stage."""
        busiest = max(window.stages, key=_busy, default=None)
        name, count = ("", 0) if busiest is None else (busiest.name, busiest.concurrency)
        self._decisions.append(Decision(name, count, count, before, window.rate, reason))

    def _settle(self, window: Window, reason: str) -> dict[str, int]:
        self._resting = window, reason
        self._decide_nothing(window, window.rate, reason)
        return {}

    def _rest(self, window: Window) -> dict[str, int]:
        """Look for steps again if the data or the training step has changed."""
        assert self._resting is not None, "the caller's condition"
        since, reason = self._resting
        noise = 4 * math.hypot(window.noise, since.noise)
        has_drifted = abs(window.rate / since.rate - 1) > max(_DRIFT, noise)
        waits_again = window.wait_ratio > _ENOUGH_WAIT and (reason == "consumer" or has_drifted)
        self._num_drifted = self._num_drifted + 1 if waits_again else 0
        if self._num_drifted < _DRIFT_WINDOWS:
            return {}
        self._begin()
        self._decide_nothing(window, since.rate, "drift")
        return self._propose(window)


def _busy(stage: StageLoad) -> float:
    return stage.busy_ratio


def _capacity(count: int, demand: float) -> float:
    """Return the items a second that ``count`` threads can pass on."""
    return count / demand if demand > 0 else math.inf


def _fewer(window: Window, bounds: Bounds) -> dict[str, int]:
    """Plan no more threads than the bounds allow, but at least one per stage, taken where they are
    needed least; return the counts that change.
    """
    before = {stage.name: stage.concurrency for stage in window.stages if stage.is_free}
    demands = {stage.name: stage.busy_seconds for stage in window.stages}
    most, counts = _most_threads(window, bounds), dict(before)
    while sum(counts.values()) > max(most, len(counts)):
        spare = [name for name in counts if counts[name] > 1]
        counts[max(spare, key=lambda name: _capacity(counts[name] - 1, demands[name]))] -= 1
    return {name: count for name, count in counts.items() if count != before[name]}


def _most_threads(window: Window, bounds: Bounds) -> int:
    """Return the limit on tunable threads, by number and by the memory each adds in flight."""
    used, limit, now = window.memory_bytes, bounds.memory_bytes, window.num_threads
    if not used or limit is None:
        return bounds.threads
    return min(bounds.threads, max(now if used <= limit else 0, int(now * limit / used)))


def _together(first: Window, second: Window) -> Window:
    """Merge two windows with equal settings; the stages' statistics are the second's."""
    return replace(
        second,
        elapsed=first.elapsed + second.elapsed,
        num_items=first.num_items + second.num_items,
        wait_seconds=first.wait_seconds + second.wait_seconds,
        noise=math.hypot(first.noise, second.noise) / 2,
    )


def _cause_of(window: Window, name: str) -> str:
    """Return why more threads gained nothing."""
    probes = window.probes
    stage = next(stage for stage in window.stages if stage.name == name)
    if probes.gil_seconds is not None and is_taken(probes.gil_seconds, probes.switch_interval):
        return "gil"
    if probes.run_delay_ratio is not None and probes.run_delay_ratio > 0.1:
        return "cpu"
    return "io-limit" if stage.cpu_ratio < 0.5 else "cpu"
