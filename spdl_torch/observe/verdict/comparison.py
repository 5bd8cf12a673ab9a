"""The comparison of two runs: which is faster, why, and whether that is more than noise."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...shown_text import printable, wrapped
from ..page.content import Column, Table, Text
from .noise import (
    bootstrap_interval,
    into_blocks,
    num_items,
    permutation_test,
    seconds_per_item,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...engine.stats.perf_stats import StageStats
    from ..page.content import Tone
    from .noise import Interval
    from .report import Report

_FEWEST_BLOCKS = 4
"""Blocks of a run below which no test can say much: with 4 and 4 the smallest p is 0.03."""

_FEWEST_ITEMS = 10  # as for predictions: below, the start of the pass is all that is measured

_SIGNIFICANT = 0.05
_WORTH_SAYING = 0.05  # smaller relative changes need no reason


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """A run beside another one, the baseline."""

    other: str
    """The name of the baseline."""
    seconds_per_item: float
    other_seconds_per_item: float
    """The same of the baseline: the loop's time for a batch, waiting included."""
    speedup: float
    """The baseline's time over this run's: 1.2 = 1.2 times as fast."""
    interval: tuple[float, float] | None
    """The 95 % confidence interval of that; None = too few intervals."""
    p_value: float | None
    """The chance of a difference as large if both runs were alike; None = too few intervals."""
    finding: str
    test: str
    """The test, described in a sentence."""
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        """Return the finding, the test and the reasons."""
        lines = [wrapped(self.finding, "COMPARED "), wrapped(self.test, "test     ")]
        lines += [wrapped(reason, "why      ") for reason in self.reasons]
        return printable("\n".join(lines))


def compare(
    report: Report,
    other: Report,
    intervals: Sequence[Interval],
    other_intervals: Sequence[Interval],
    *,
    other_name: str = "the other run",
    differences: Sequence[str] = (),
) -> Comparison | None:
    """Compare a run with another one; None where one of them delivered fewer than 10 items.

    intervals, other_intervals: items and seconds of consecutive parts of each run.
    differences: known differences in the circumstances.
    """
    if min(num_items(intervals), num_items(other_intervals)) < _FEWEST_ITEMS:
        return None
    now, then = into_blocks(intervals), into_blocks(other_intervals)
    seconds, other_seconds = seconds_per_item(now), seconds_per_item(then)
    if not (math.isfinite(seconds) and math.isfinite(other_seconds) and seconds > 0):
        return None
    speedup = other_seconds / seconds
    enough = min(len(now), len(then)) >= _FEWEST_BLOCKS
    p_value = permutation_test(now, then) if enough else None
    interval = bootstrap_interval(now, then) if enough else None
    return Comparison(
        other=other_name,
        seconds_per_item=seconds,
        other_seconds_per_item=other_seconds,
        speedup=speedup,
        interval=interval,
        p_value=p_value,
        finding=_finding(speedup, interval, p_value, other_name),
        test=_test(len(now), len(then), p_value),
        reasons=tuple(_reasons(report, other, seconds, other_seconds, differences)),
    )


def why_not_compared(
    intervals: Sequence[Interval], other_intervals: Sequence[Interval], other_name: str, unit: str
) -> str:
    """Return why :func:`compare` gave None, as a sentence."""
    return (
        f"Not with {other_name}: {num_items(intervals):,} {unit} were measured here and "
        f"{num_items(other_intervals):,} there, and a comparison needs {_FEWEST_ITEMS} of each."
    )


def sections_of_comparison(
    comparison: Comparison, report: Report, other: Report
) -> list[Text | Table]:
    """Return the comparison's part of a page: sentences, and both runs side by side."""
    faster = comparison.speedup >= 1
    sure = comparison.p_value is not None and comparison.p_value < _SIGNIFICANT
    tone: Tone = ("good" if faster else "bad") if sure else "note"
    texts = [Text(word="COMPARED", text=comparison.finding, tone=tone)]
    texts.append(Text(word="test", text=comparison.test))
    texts += [Text(word="why", text=reason) for reason in comparison.reasons]
    return [*texts, _side_by_side(comparison, report, other)]


def _finding(
    speedup: float, interval: tuple[float, float] | None, p_value: float | None, other: str
) -> str:
    if speedup >= 1:
        words = f"{speedup:.2f}x as fast as {other}"
    else:
        words = f"slower than {other}: {speedup:.2f}x its speed"
    if interval is not None:
        words += f" (95 % interval {interval[0]:.2f}x to {interval[1]:.2f}x)"
    if p_value is None:
        return f"This run is {words}; too short to say whether that is more than noise."
    if p_value < _SIGNIFICANT:
        return f"This run is {words}, which is more than noise ({_p(p_value)})."
    return f"This run is {words}, which may be noise ({_p(p_value)})."


def _p(p_value: float) -> str:
    return "p < 0.001" if p_value < 0.001 else f"p = {p_value:.3f}"


def _test(num_now: int, num_then: int, p_value: float | None) -> str:
    if p_value is None:
        return (
            f"None: {num_now} and {num_then} intervals were measured, and a test needs "
            f"{_FEWEST_BLOCKS} of each run. Measure for longer, or log more often."
        )
    return (
        f"Two-sided permutation test on the time per batch, over {num_now} and {num_then} "
        "consecutive blocks of the two runs; the 95 % interval is bootstrapped from the same "
        "blocks. It sees how the speed varies within each run. What else differed between the "
        "two, such as other programs on the machine, it cannot see: run both again, in turns, "
        "before you rely on a small difference."
    )


def _reasons(
    report: Report,
    other: Report,
    seconds: float,
    other_seconds: float,
    differences: Sequence[str],
) -> list[str]:
    wait = seconds * report.stats.consumer_wait_ratio
    other_wait = other_seconds * other.stats.consumer_wait_ratio
    step, other_step = seconds - wait, other_seconds - other_wait
    reasons = [
        f"A batch takes {_ms(seconds)} instead of {_ms(other_seconds)}: "
        f"{_ms(wait)} instead of {_ms(other_wait)} of waiting for data, and "
        f"{_ms(step)} instead of {_ms(other_step)} of the training step."
    ]
    blamed = (report.verdict.stage, other.verdict.stage)
    before = {stage.name: stage for stage in other.stats.stages}
    for stage in report.stats.stages:
        then = before.get(stage.name)
        if then is not None and stage.name in blamed:
            reasons += _reasons_of_stage(stage, then)
    if report.verdict.cause is not other.verdict.cause or blamed[0] != blamed[1]:
        reasons.append(f"Before: {other.verdict.finding} Now: {report.verdict.finding}")
    if differences:
        reasons.append(f"Circumstances that differ: {'; '.join(differences)}.")
    return reasons


def _reasons_of_stage(now: StageStats, then: StageStats) -> list[str]:
    parts = []
    if now.concurrency != then.concurrency:
        parts.append(f"{now.concurrency} workers instead of {then.concurrency}")
    if _differs(now.tasks.ave_time, then.tasks.ave_time):
        parts.append(
            f"a call takes {_ms(now.tasks.ave_time)} instead of {_ms(then.tasks.ave_time)}"
        )
    if abs(now.cpu_ratio - then.cpu_ratio) > _WORTH_SAYING:
        parts.append(f"{now.cpu_ratio:.0%} of that on a core instead of {then.cpu_ratio:.0%}")
    if not parts or not _differs(now.capacity, then.capacity):
        return []
    return [
        f"Stage {now.name!r} could make {now.capacity:,.0f} instead of {then.capacity:,.0f} calls "
        f"a second: {', '.join(parts)}."
    ]


def _differs(now: float, then: float) -> bool:
    return abs(now - then) > _WORTH_SAYING * max(abs(now), abs(then))


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.2f} ms" if seconds < 0.1 else f"{seconds:,.3f} s"


def _side_by_side(comparison: Comparison, report: Report, other: Report) -> Table:
    rows: list[tuple[str, str, float | None, float | None, float | None]] = []

    def add(what: str, unit: str, now: float | None, then: float | None) -> None:
        known = now is not None and then is not None and then != 0
        rows.append((what, unit, now, then, now / then if known else None))  # type: ignore[operator]  # ``known``: both numbers

    add(
        "time per batch",
        "ms",
        1e3 * comparison.seconds_per_item,
        1e3 * comparison.other_seconds_per_item,
    )
    now_waits, then_waits = report.stats.consumer_wait_ratio, other.stats.consumer_wait_ratio
    add("waiting for data", "%", 100 * now_waits, 100 * then_waits)
    then_probes, probes = other.probes, report.probes
    add(
        "wait for the GIL",
        "ms",
        _times(1e3, probes.gil_seconds),
        _times(1e3, then_probes.gil_seconds),
    )
    add(
        "without a core",
        "%",
        _times(100, probes.run_delay_ratio),
        _times(100, then_probes.run_delay_ratio),
    )
    add("garbage collection", "%", _times(100, probes.gc_ratio), _times(100, then_probes.gc_ratio))
    before = {stage.name: stage for stage in other.stats.stages}
    for stage in report.stats.stages:
        then = before.pop(stage.name, None)
        for what, unit, figure in _FIGURES:
            add(
                f"{stage.name}: {what}", unit, figure(stage), None if then is None else figure(then)
            )
    for stage in before.values():
        for what, unit, figure in _FIGURES:
            add(f"{stage.name}: {what}", unit, None, figure(stage))
    return Table(
        title=f"Side by side with {comparison.other}",
        columns=[
            Column("figure"),
            Column("unit"),
            Column("this run", "rate"),
            Column(comparison.other, "rate"),
            Column("ratio", "rate", "This run over the other one."),
        ],
        rows=rows,
    )


def _times(factor: float, value: float | None) -> float | None:
    return None if value is None else factor * value


_FIGURES = (
    ("workers", "count", lambda stage: float(stage.concurrency)),
    ("busy", "%", lambda stage: 100 * stage.busy_ratio),
    ("CPU/wall", "%", lambda stage: 100 * stage.cpu_ratio),
    ("p50", "ms", lambda stage: 1e3 * stage.tasks.p50_time),
    ("p99", "ms", lambda stage: 1e3 * stage.tasks.p99_time),
    ("at most", "1/s", lambda stage: stage.capacity),
)
