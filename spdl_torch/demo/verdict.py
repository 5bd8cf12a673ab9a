"""What the figures mean and what to do about them: pure functions."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .jobs import Measurement, StageRow

__all__ = ["LOADER", "TRAINER", "Verdict", "bottleneck", "compare", "quiet_rounds"]

LOADER = "loader"
TRAINER = "trainer"

_INPUT_BOUND = 0.05
"""Below this share of the step, waiting is noise: removing it all would gain less than 5 %."""

_ALWAYS_BUSY = 0.5
"""A stage whose threads work less than this does not hold the others back."""

_COMPUTING = 0.7
"""CPU over wall time from which a stage computes rather than waits for files, locks or a core."""


_DISTURBED = 0.1
"""Share of the cores in use by other programs from which speeds are not compared: at one half,
one and the same loader was measured at 8 and at 37 images/s."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A finding and its consequence, a sentence each."""

    finding: str
    advice: str


def bottleneck(rows: Sequence[StageRow], wait_ratio: float) -> tuple[str, Verdict]:
    """Name what holds training back: ``TRAINER``, a stage of ``rows``, or ``LOADER`` without rows.

    ``wait_ratio`` is the share of the training time spent waiting for batches, 0 to 1.
    """
    waiting = f"it waits {_percent(wait_ratio)} of the time for data"
    if wait_ratio < _INPUT_BOUND:
        return TRAINER, Verdict(f"Training is not input-bound: {waiting}.", "Nothing to tune.")
    if not rows:
        return LOADER, Verdict(f"Training is input-bound: {waiting}.", "Raise num_workers.")
    stage = max(rows, key=lambda row: row.busy_ratio)
    finding = (
        f"Training is input-bound: {waiting}. "
        f"The bottleneck is stage {stage.name!r}, busy {_percent(stage.busy_ratio)}"
    )
    if stage.busy_ratio < _ALWAYS_BUSY:
        return stage.name, Verdict(
            f"{finding}, so no stage is short of threads.",
            "The wait is the start of each pass: use longer epochs or persistent_workers=True.",
        )
    if stage.cpu_ratio < _COMPUTING:
        return stage.name, Verdict(
            f"{finding}, computing {_percent(stage.cpu_ratio)} of that.",
            f"Its threads wait for files, locks or a core: raise num_workers above "
            f"{stage.concurrency} while cores or disks are idle.",
        )
    return stage.name, Verdict(
        f"{finding}, all of it computing.",
        f"Give it more cores (num_workers above {stage.concurrency}) or less work per image.",
    )


def quiet_rounds(
    results: Mapping[str, Sequence[Measurement]], num_cores: int
) -> dict[str, list[Measurement]]:
    """The runs that other programs left alone; all of them if a variant would have none left."""
    quiet = {
        variant: [m for m in rounds if not _is_disturbed(m, num_cores)]
        for variant, rounds in results.items()
    }
    return quiet if all(quiet.values()) else {key: list(rounds) for key, rounds in results.items()}


def _is_disturbed(measurement: Measurement, num_cores: int) -> bool:
    return (measurement.other_cores or 0.0) > _DISTURBED * num_cores


def compare(theirs: Sequence[Measurement], ours: Sequence[Measurement], num_cores: int) -> Verdict:
    """Sum up the rounds of torch's loader and of ours."""
    disturbed = [m for m in (*theirs, *ours) if _is_disturbed(m, num_cores)]
    if disturbed:
        others = max(m.other_cores or 0.0 for m in disturbed)
        return Verdict(
            f"None: other programs used up to {others:.1f} of the {num_cores} cores meanwhile.",
            "Repeat when the machine is quiet; until then trust the CPU time more than the speed.",
        )
    waits = tuple(median(m.wait_ratio for m in rounds) for rounds in (theirs, ours))
    before, after = ([m.training_images_per_second for m in rounds] for rounds in (theirs, ours))
    gain = median(after) / median(before)
    # Rounds that overlap could come from one loader measured twice.
    faster = gain >= 1 + _INPUT_BOUND and min(after) > max(before)
    waiting = f"waits {_percent(waits[0])} of the time for data with torch's loader"
    waiting += f", {_percent(waits[1])} with ours"
    if faster:
        return Verdict(
            f"Training is {gain:.2f}x as fast with ours; it {waiting}.",
            "Change two imports: from spdl_torch import DataLoader, ImageFolder",
        )
    if max(waits) < _INPUT_BOUND:
        rates = [median(m.loading_images_per_second for m in rounds) for rounds in (theirs, ours)]
        return Verdict(
            f"The model is the limit: training {waiting}.",
            f"Nothing to gain here. The loaders reach {rates[0]:.0f} (torch) and {rates[1]:.0f} "
            "images/s: they matter to a model that is faster than that.",
        )
    return Verdict(
        f"Training is not clearly faster with ours ({gain:.2f}x); it {waiting}.",
        "Measure longer with --epochs and --rounds, or act on the bottleneck above.",
    )


def _percent(ratio: float) -> str:
    return f"{100 * ratio:.1f} %" if ratio < 0.1 else f"{100 * ratio:.0f} %"
