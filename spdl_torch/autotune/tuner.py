"""The tuner: turns windows of a run into changes of its stages' concurrency. No thread and no
clock.

One change at a time is on trial: the window after it shows whether the consumer got faster, by more
than the noise. If not, it is reverted and the stage is left alone, for a reason that is logged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import TYPE_CHECKING, Literal

from ..machine.gil import is_taken
from .allocation import ThreadPlan, grow, most_threads, shrink
from .window import Decision

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .window import Bounds, StageLoad, Window

_ENOUGH_WAIT = 0.05
"""The share of waiting up to which training is not input-bound; TensorFlow's threshold."""

_CALM_WINDOWS = 3
_IDLE_WINDOWS = 2
"""The consecutive windows without a busy stage before the tuner acts on it."""

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

    counts: Mapping[str, int] = field(default_factory=dict)
    """New concurrency by stage."""
    decisions: tuple[Decision, ...] = ()
    """The decisions about earlier steps, or the reason why there is no step."""


@dataclass(slots=True)
class _Trial:
    kind: Literal["more", "fewer"]
    stage: str
    before: Window
    counts: dict[str, int]
    window: Window | None = None
    num_windows: int = 0


@dataclass(slots=True)
class _Rest:
    """A time without steps, since nothing was left to gain."""

    since: Window
    reason: str
    num_drifted: int = 0
    """The consecutive windows, up to now, that differ from ``since``."""


_NOTHING = Step()


class Tuner:
    """Give it window after window by :meth:`step`; it never changes more than ``bounds`` allow."""

    def __init__(self, bounds: Bounds, *, warm_up: int = 1) -> None:
        self.bounds = bounds
        self.num_windows = 0
        """The number of windows seen so far, without the first ones."""
        self._warm_up = warm_up
        self._factor = _FIRST_FACTOR
        self._frozen: dict[str, str] = {}  # stage -> why more threads there gain nothing
        self._no_fewer: set[str] = set()
        self._trial: _Trial | None = None
        self._baseline: list[Window] = []  # with the present numbers, while they are noisy
        self._undecided: set[str] = set()  # stages whose trial gained, though within the noise
        self._num_calm = self._num_idle = 0
        self._resting: _Rest | None = None

    @property
    def is_settled(self) -> bool:
        """Whether nothing is left to gain; the tuner then watches for changes."""
        return self._resting is not None

    def step(self, window: Window) -> Step:
        """Return what to do after a window without a change."""
        if self._warm_up:
            self._warm_up -= 1
            return _NOTHING
        self.num_windows += 1
        if not window.num_items:
            return _NOTHING
        if self._trial is not None:
            return self._judge(self._trial, window)
        over = self._back_into_memory(window)
        if over is not None:
            return over
        return self._propose(window) if self._resting is None else self._rest(self._resting, window)

    def _propose(self, window: Window) -> Step:
        if window.wait_ratio <= _ENOUGH_WAIT:
            self._num_calm += 1
            return self._settle(window, "consumer") if self._num_calm >= _CALM_WINDOWS else _NOTHING
        self._num_calm = 0
        plan = grow(window, self.bounds, self._frozen, self._factor)
        if plan is not None and plan.counts:
            self._baseline.append(window)
            before = reduce(_together, self._baseline)
            if before.noise > _NOISY and len(self._baseline) <= _EXTRA_WINDOWS:
                return _NOTHING
            return self._try("more", plan.bottleneck, before, plan.counts)
        if plan is not None:
            self._frozen[plan.bottleneck] = plan.bound
        why = self._why(window, plan)
        self._num_idle = self._num_idle + 1 if why == "source" else 0
        if 0 < self._num_idle < _IDLE_WINDOWS:
            return _NOTHING  # a single window may be an outlier
        fewer = self._fewer(window)
        if fewer is not None:
            return self._try("fewer", fewer.name, window, {fewer.name: fewer.concurrency // 2})
        return self._settle(window, why)

    def _try(
        self,
        kind: Literal["more", "fewer"],
        stage: str,
        window: Window,
        counts: dict[str, int],
    ) -> Step:
        self._trial = _Trial(kind, stage, window, counts)
        self._baseline.clear()
        return Step(counts=counts)

    def _fewer(self, window: Window) -> StageLoad | None:
        """Return a multi-threaded stage whose calls are short, or wait for the GIL or a core."""
        candidates = [
            stage
            for stage in window.stages
            if stage.is_free
            and stage.concurrency > 1
            and stage.name not in self._no_fewer
            and stage.num_tasks
            and (
                (stage.shares_gil and stage.task_seconds < _SHORT_SECONDS)
                or self._frozen.get(stage.name) in ("gil", "cpu")
            )
        ]
        return max(candidates, key=lambda stage: stage.busy_ratio, default=None)

    def _why(self, window: Window, plan: ThreadPlan | None) -> str:
        """Return what holds the consumer back when no step is left."""
        if plan is not None:
            return plan.bound
        busiest = max(window.stages, key=lambda stage: stage.busy_ratio, default=None)
        if busiest is not None and busiest.name in self._frozen:
            return self._frozen[busiest.name]
        if busiest is not None and busiest.busy_ratio >= 0.75:
            return "max"  # its concurrency is not ours to change
        return "source"

    def _judge(self, trial: _Trial, window: Window) -> Step:
        trial.num_windows += 1
        after = window if trial.window is None else _together(trial.window, window)
        trial.window = after
        before = trial.before
        gain = after.rate / before.rate - 1 if before.rate else math.inf
        noise = math.hypot(before.noise, after.noise)
        need = max(_LEAST_GAIN, 2 * noise)
        is_noisy = noise > _NOISY and gain > -need
        is_unclear = gain < need and (gain >= _LEAST_GAIN or is_noisy)
        if is_unclear and trial.num_windows <= _EXTRA_WINDOWS:
            return _NOTHING  # it may have gained: look longer
        self._trial = None
        if gain >= need:
            if trial.kind == "more":
                self._factor = _NEXT_FACTOR if gain >= 0.6 * (self._factor - 1) else _FIRST_FACTOR
                self._no_fewer.discard(trial.stage)
            return self._with(self._propose(window), self._decide(trial, after, "gained"))
        reason = _cause_of(after, trial.stage)
        if trial.kind == "more" and is_unclear and trial.stage not in self._undecided:
            self._undecided.add(trial.stage)  # it is tried once more
            reason = "noise"
        elif trial.kind == "more":
            self._frozen[trial.stage] = reason
        else:
            self._no_fewer.add(trial.stage)
            reason = "no gain"
        return Step(
            counts=_counts_of(before, trial.counts),
            decisions=self._decide(trial, after, reason, taken_back=True),
        )

    def _decide(
        self, trial: _Trial, after: Window, reason: str, *, taken_back: bool = False
    ) -> tuple[Decision, ...]:
        then = _counts_of(trial.before, trial.counts)
        pairs = (
            (n, count, then[n]) if taken_back else (n, then[n], count)
            for n, count in trial.counts.items()
        )
        return tuple(
            Decision(
                stage=name,
                from_count=old,
                to_count=new,
                before=trial.before.rate,
                after=after.rate,
                reason=reason,
            )
            for name, old, new in pairs
        )

    def _settle(self, window: Window, reason: str) -> Step:
        self._resting, self._num_calm = _Rest(window, reason), 0
        return Step(decisions=(_no_change(window, window.rate, reason),))

    def _rest(self, resting: _Rest, window: Window) -> Step:
        before = resting.since
        drift = abs(window.rate / before.rate - 1) if before.rate else 0.0
        noise = 4 * math.hypot(window.noise, before.noise)
        waits_again = resting.reason == "consumer" or drift > max(_DRIFT, noise)
        if waits_again and window.wait_ratio > _ENOUGH_WAIT:
            resting.num_drifted += 1
        else:
            resting.num_drifted = 0
        if resting.num_drifted >= _DRIFT_WINDOWS:
            return self._rearm(before.rate, window)
        return _NOTHING

    def _rearm(self, rate: float, window: Window) -> Step:
        """Look for steps again: the data or the training step has changed. ``rate``: before."""
        self._resting = None
        self._frozen.clear()
        self._no_fewer.clear()
        self._undecided.clear()
        self._factor = _FIRST_FACTOR
        step = self._propose(window)
        return self._with(step, (_no_change(window, rate, "drift"),))

    def _back_into_memory(self, window: Window) -> Step | None:
        """Reduce threads at once, without a trial, if too much memory is in flight."""
        used, limit = window.memory_bytes, self.bounds.memory_bytes
        if used is None or limit is None or used <= limit:
            return None
        counts = shrink(window, most_threads(window, self.bounds))
        if not counts:
            return None
        trial = _Trial("fewer", "", window, counts)
        return Step(counts=counts, decisions=self._decide(trial, window, "memory"))

    @staticmethod
    def _with(step: Step, decisions: tuple[Decision, ...]) -> Step:
        return replace(step, decisions=(*decisions, *step.decisions))


def _counts_of(window: Window, changed: Mapping[str, int]) -> dict[str, int]:
    """Return the concurrency in a window of the stages that were changed."""
    return {s.name: s.concurrency for s in window.stages if s.name in changed}


def _no_change(window: Window, before: float, reason: str) -> Decision:
    """Return a decision without a change, for the busiest stage."""
    busiest = max(window.stages, key=lambda stage: stage.busy_ratio, default=None)
    count = 0 if busiest is None else busiest.concurrency
    return Decision(
        stage="" if busiest is None else busiest.name,
        from_count=count,
        to_count=count,
        before=before,
        after=window.rate,
        reason=reason,
    )


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
