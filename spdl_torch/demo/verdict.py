"""The meaning of the measurements and what to do about them: pure functions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import comb
from statistics import median
from typing import TYPE_CHECKING

from ..observe.verdict.verdict import judge
from ..shown_text import percent

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


def seen_by_training(report: Report, wait_ratio: float) -> Report:
    """Return a loader's report on training that waits for ``wait_ratio`` of its time, 0 to 1, from
    its first step on: the report's own ratio includes the workers' start.
    """
    stats = replace(report.stats, consumer_wait_ratio=wait_ratio)
    return replace(report, stats=stats, verdict=judge(stats, report.probes, pooled=report.pooled))


def bottleneck(report: Report) -> str:
    """Return what a report says about training, and what to do."""
    verdict = report.verdict
    used, there = report.probes.cores_used, report.probes.num_cores
    # Workers that are busy 94 % of the time may yet leave a core idle: the advice is about cores.
    cores = "" if used is None else f" Training and its workers used {used:.1f} of {there:g} cores."
    return f"{verdict.finding}{cores} {verdict.action}"


def quiet_rounds(
    results: Mapping[str, Sequence[Measurement]], num_cores: int
) -> dict[str, list[Measurement]]:
    """Return the rounds of which other programs disturbed no turn; all rounds if fewer than half of
    them would be left."""
    disturbed = {
        number
        for rounds in results.values()
        for number, each in enumerate(rounds)
        if _is_disturbed(each, num_cores)
    }
    if 2 * len(disturbed) > min(map(len, results.values())):
        disturbed = set()
    return {
        variant: [each for number, each in enumerate(rounds) if number not in disturbed]
        for variant, rounds in results.items()
    }


def _is_disturbed(measurement: Measurement, num_cores: int) -> bool:
    return (measurement.other_cores or 0.0) > _DISTURBED * num_cores


def rate_of(rounds: Sequence[Measurement]) -> float:
    """Return the images a second that a loader alone delivers: a faster model waits for it."""
    return median(loading_rates(rounds))


def wait_at(model_rate: float, loading_rate: float) -> float:
    """Return the share of its time, 0 to 1, that a model waits if by itself it takes ``model_rate``
    images a second and leaves the cores to a loader of ``loading_rate``.

    ``2000, 500 -> 0.75``: three of four steps' time is waiting.
    """
    return max(0.0, 1.0 - loading_rate / model_rate)


def noises(results: Mapping[str, Sequence[Measurement]]) -> dict[str, float]:
    """Return by which part the ratios of each row of speeds may be off, by what is measured in it,
    where there are several pairs."""
    first, *others = results.values()
    rows = {
        "in training the light network": light_rates,
        "in training resnet18": resnet_rates,
        "in loading alone": loading_rates,
    }
    found = {}
    for what, rates_of in rows.items():
        gains = [gain_of(rates_of(first), rates_of(each)) for each in others]
        noise = [each.noise for each in gains if each.num_pairs > 1]
        if noise:
            found[what] = max(noise)
    return found


def light_rates(rounds: Sequence[Measurement]) -> list[float]:
    """Return the images a second of each epoch of the light network."""
    return [rate for each in rounds for rate in each.light.epochs]


def resnet_rates(rounds: Sequence[Measurement]) -> list[float]:
    """Return the images a second of each epoch of resnet18."""
    return [rate for each in rounds for rate in each.resnet.epochs]


def loading_rates(rounds: Sequence[Measurement]) -> list[float]:
    """Return the images a second of each round's pass without a network."""
    return [each.loading_images_per_second for each in rounds]


@dataclass(frozen=True, slots=True)
class Gain:
    """A rate over torch's: the median of the pairs, and between what the true one lies."""

    median: float
    low: float
    high: float
    num_pairs: int

    @property
    def noise(self) -> float:
        """The part by which the median may be off."""
        return max(self.high / self.median, self.median / self.low) - 1

    @property
    def outcome(self) -> str:
        """The word for it: a difference counts that is larger than the noise, and matters."""
        if self.median >= 1 + _INPUT_BOUND and self.low > 1:
            return "Faster"
        if self.median <= 1 - _INPUT_BOUND and self.high < 1:
            return "Slower"
        return "About level"

    def __str__(self) -> str:
        if self.num_pairs == 1:
            return f"{self.median:.2f}x"
        return f"{self.median:.2f}x ({self.low:.2f} to {self.high:.2f})"


def gain_of(theirs: Sequence[float], ours: Sequence[float]) -> Gain:
    """Return our rates over theirs; epochs of the same place in their rounds, which were measured
    one after the other, make a pair.

    Whatever the noise is like, half of the pairs are expected above the true ratio: the ends are
    those pairs between which it lies 9 times of 10. With fewer than five pairs the least and the
    most do less.
    """
    pairs = sorted(after / before for before, after in zip(theirs, ours, strict=False))
    left_out = _left_out(len(pairs))
    return Gain(median(pairs), pairs[left_out], pairs[-1 - left_out], len(pairs))


def _left_out(count: int) -> int:
    """Return how many of ``count`` pairs may be left out at each end.

    ``5 -> 0; 8 -> 1; 20 -> 5``.
    """
    beyond = 0
    for number in range(count):
        beyond += comb(count, number)
        if 2 * beyond > _ODDS * 2**count:
            return max(number - 1, 0)
    return 0


_ODDS = 0.1


def compare(
    theirs: Sequence[Measurement],
    ours: Sequence[Measurement],
    num_cores: int,
    *,
    subject: str = "our DataLoader",
    fewer: Mapping[str, Sequence[Measurement]] | None = None,
) -> Verdict:
    """Sum up the rounds of torch's loader and of ours, by how fast networks train.

    subject: what of ours was imported. fewer: the rounds where less of ours was, by what was.
    """
    disturbed = [m for m in (*theirs, *ours) if _is_disturbed(m, num_cores)]
    if disturbed:
        others = max(m.other_cores or 0.0 for m in disturbed)
        return Verdict(
            f"No verdict: other programs used up to {others:.1f} of {num_cores} cores meanwhile.",
            "Repeat when the machine is quiet; until then trust the CPU time more than the speed.",
        )
    light, resnet = _gains(theirs, ours)
    less = {f"{name} alone": rounds for name, rounds in (fewer or {}).items()}
    over = "; ".join(
        _trained(name, theirs, rounds) for name, rounds in {subject: ours, **less}.items()
    )
    if {light.outcome, resnet.outcome} == {"Faster", "Slower"}:
        return Verdict(
            f"{light.outcome} with one network, {resnet.outcome.lower()} with the other: {over}.",
            "More rounds tell whether that is chance: --rounds 20.",
        )
    if light.outcome == "Faster":
        return Verdict(f"Faster: {over}.", _who_gains(theirs, ours))
    if light.outcome == "Slower":
        return Verdict(f"Slower: {over}.", "Keep torch's for this dataset.")
    return Verdict(f"About level: {over}.", "More rounds tell smaller differences: --rounds 20.")


def _gains(theirs: Sequence[Measurement], ours: Sequence[Measurement]) -> tuple[Gain, Gain]:
    """Return those in training a light network and resnet18."""
    return (
        gain_of(light_rates(theirs), light_rates(ours)),
        gain_of(resnet_rates(theirs), resnet_rates(ours)),
    )


def _trained(name: str, theirs: Sequence[Measurement], ours: Sequence[Measurement]) -> str:
    light, resnet = _gains(theirs, ours)
    return f"with {name} a light network trains at {light} torch's images/s, resnet18 at {resnet}"


def _who_gains(theirs: Sequence[Measurement], ours: Sequence[Measurement]) -> str:
    before, after = rate_of(theirs), rate_of(ours)
    rate = median(m.resnet.images_per_second for m in theirs)
    waits = [median(m.resnet.wait_ratio for m in rounds) for rounds in (theirs, ours)]
    return (
        f"It matters to a model that takes more than {before:,.0f} images/s; one above "
        f"{after:,.0f} waits for ours, too. resnet18 takes {rate:,.0f} here: it waits "
        f"{percent(waits[0])} of its time with torch's, {percent(waits[1])} with ours."
    )
