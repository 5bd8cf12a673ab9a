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
    used, there = report.probes.cores_used, report.probes.num_cores
    # Workers that are busy 94 % of the time may yet leave a core idle: the advice is about cores.
    cores = "" if used is None else f" Training and its workers used {used:.1f} of {there:g} cores."
    return Verdict(f"{judged.finding}{cores}", judged.action)


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
    return median(loading_rates(rounds))


def wait_at(model_rate: float, loading_rate: float) -> float:
    """Return the share of its time, 0 to 1, that a model waits if by itself it takes ``model_rate``
    images a second and leaves the cores to a loader of ``loading_rate``.

    ``2000, 500 -> 0.75``: three of four steps' time is waiting.
    """
    return max(0.0, 1.0 - loading_rate / model_rate)


def noise_of(rates: Mapping[str, Sequence[float]]) -> float | None:
    """Return by which part of their median the rates of one loader differ, for the loader where
    that is largest; None where none has two."""
    return max(
        ((max(each) - min(each)) / median(each) for each in rates.values() if len(each) > 1),
        default=None,
    )


def noises(results: Mapping[str, Sequence[Measurement]]) -> dict[str, float]:
    """Return the noise of each row of speeds, by what is measured in it, where it is known."""
    rows = {
        "in training the light network": light_rates,
        "in training resnet18": resnet_rates,
        "in loading alone": loading_rates,
    }
    found = {
        what: noise_of({key: rates_of(rounds) for key, rounds in results.items()})
        for what, rates_of in rows.items()
    }
    return {what: noise for what, noise in found.items() if noise is not None}


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
    """A rate over torch's: of the medians, and of the epochs one by one, least and most."""

    median: float
    low: float
    high: float
    num_pairs: int

    def __str__(self) -> str:
        if self.num_pairs == 1:
            return f"{self.median:.2f}x"
        return f"{self.median:.2f}x ({self.low:.2f} to {self.high:.2f})"


def gain_of(theirs: Sequence[float], ours: Sequence[float]) -> Gain:
    """Return our rates over theirs; epochs of the same place in their rounds make a pair.

    If both were equally fast, all of 6 pairs would be on one side of 1 in 3 runs of 100.
    """
    ratio = median(ours) / median(theirs)
    pairs = [after / before for before, after in zip(theirs, ours, strict=False)]
    return Gain(ratio, min(ratio, *pairs), max(ratio, *pairs), len(pairs))


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
            f"None: other programs used up to {others:.1f} of the {num_cores} cores meanwhile.",
            "Repeat when the machine is quiet; until then trust the CPU time more than the speed.",
        )
    gain = gain_of(light_rates(theirs), light_rates(ours))
    less = {f"{name} alone": rounds for name, rounds in (fewer or {}).items()}
    over = "; ".join(
        _trained(name, theirs, rounds) for name, rounds in {subject: ours, **less}.items()
    )
    if gain.median >= 1 + _INPUT_BOUND and gain.low > 1:
        return Verdict(f"Faster: {over}.", _who_gains(theirs, ours))
    if gain.median <= 1 - _INPUT_BOUND and gain.high < 1:
        return Verdict(f"Slower: {over}.", "Keep torch's for this dataset.")
    return Verdict(f"About level: {over}.", "More rounds tell smaller differences: --rounds 5.")


def _trained(name: str, theirs: Sequence[Measurement], ours: Sequence[Measurement]) -> str:
    light = gain_of(light_rates(theirs), light_rates(ours))
    resnet = gain_of(resnet_rates(theirs), resnet_rates(ours))
    return f"with {name} a light network trains at {light} torch's images/s, resnet18 at {resnet}"


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
