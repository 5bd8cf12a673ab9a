"""The meaning of the measurements and what to do about them: pure functions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

from ..observe.verdict.verdict import judge

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..observe import Report
    from .jobs import Measurement

_INPUT_BOUND = 0.05
"""Below this share of the step, waiting is noise: removing it all would gain less than 5 %."""

_DISTURBED = 0.1
"""Share of the cores in use by other programs from which speeds are not compared: at one half, the
same loader was measured at 8 and at 37 images/s."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A finding and its consequence, a sentence each."""

    finding: str
    advice: str


def bottleneck(report: Report, wait_ratio: float) -> Verdict:
    """Return what a loader's report says about training that waits for ``wait_ratio`` of its time,
    0 to 1, from its first step on: the report's own ratio includes the workers' start.
    """
    stats = replace(report.stats, consumer_wait_ratio=wait_ratio)
    judged = judge(stats, report.probes, pooled=report.pooled)
    return Verdict(judged.finding, judged.action)


def quiet_rounds(
    results: Mapping[str, Sequence[Measurement]], num_cores: int
) -> dict[str, list[Measurement]]:
    """Return the runs that other programs did not disturb; all of them if a variant would have none
    left."""
    quiet = {
        variant: [m for m in rounds if not _is_disturbed(m, num_cores)]
        for variant, rounds in results.items()
    }
    return quiet if all(quiet.values()) else {key: list(rounds) for key, rounds in results.items()}


def _is_disturbed(measurement: Measurement, num_cores: int) -> bool:
    return (measurement.other_cores or 0.0) > _DISTURBED * num_cores


def rate_of(rounds: Sequence[Measurement]) -> float:
    """Return the images a second that a loader alone delivers: a faster model waits for it."""
    return median(m.loading_images_per_second for m in rounds)


def wait_at(model_rate: float, loading_rate: float) -> float:
    """Return the share of its time, 0 to 1, that a model waits if by itself it takes ``model_rate``
    images a second and leaves the cores to a loader of ``loading_rate``.

    ``2000, 500 -> 0.75``: three of four steps' time is waiting.
    """
    return max(0.0, 1.0 - loading_rate / model_rate)


def noise_of(results: Mapping[str, Sequence[Measurement]]) -> float | None:
    """Return by which part of their median the rounds of a loader differ, in loading alone, for the
    loader where that is largest; None where none has two rounds.
    """
    rates = [[m.loading_images_per_second for m in rounds] for rounds in results.values()]
    return max(
        ((max(each) - min(each)) / median(each) for each in rates if len(each) > 1), default=None
    )


def compare(
    theirs: Sequence[Measurement],
    ours: Sequence[Measurement],
    num_cores: int,
    *,
    subject: str = "our DataLoader",
    fewer: Mapping[str, Sequence[Measurement]] | None = None,
) -> Verdict:
    """Sum up the rounds of torch's loader and of ours, by loading alone.

    subject: what of ours was imported. fewer: the rounds where less of ours was, by what was.
    """
    disturbed = [m for m in (*theirs, *ours) if _is_disturbed(m, num_cores)]
    if disturbed:
        others = max(m.other_cores or 0.0 for m in disturbed)
        return Verdict(
            f"None: other programs used up to {others:.1f} of the {num_cores} cores meanwhile.",
            "Repeat when the machine is quiet; until then trust the CPU time more than the speed.",
        )
    before, after = ([m.loading_images_per_second for m in rounds] for rounds in (theirs, ours))
    gain = median(after) / median(before)
    over = f"with {subject} {gain:.2f}x torch's images/s ("
    over += f"{median(after):,.0f} over {median(before):,.0f})"
    for name, rounds in (fewer or {}).items():
        over += f"; with {name} alone {rate_of(rounds) / median(before):.2f}x"
    # Rounds that overlap could come from one loader measured twice.
    if gain >= 1 + _INPUT_BOUND and min(after) > max(before):
        return Verdict(f"Faster: {over}.", _who_gains(theirs, ours))
    if gain <= 1 - _INPUT_BOUND and max(after) < min(before):
        return Verdict(f"Slower: {over}.", "Keep torch's for this dataset.")
    return Verdict(
        f"No clear difference: {over}. Rounds of one loader differ as much.",
        "More rounds may show one: --rounds 5.",
    )


def _who_gains(theirs: Sequence[Measurement], ours: Sequence[Measurement]) -> str:
    before, after = rate_of(theirs), rate_of(ours)
    rate = median(m.resnet.images_per_second for m in theirs)
    waits = [median(m.resnet.wait_ratio for m in rounds) for rounds in (theirs, ours)]
    return (
        f"It matters to a model that takes more than {before:,.0f} images/s; one above "
        f"{after:,.0f} waits for ours, too. resnet18 takes {rate:,.0f} here: it waits "
        f"{_percent(waits[0])} of its time with torch's, {_percent(waits[1])} with ours."
    )


def _percent(ratio: float) -> str:
    return f"{100 * ratio:.1f} %" if ratio < 0.1 else f"{100 * ratio:.0f} %"
