"""The measurements of a run of the demo so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..observe.verdict.report import Report
from .jobs import VARIANTS, WORKLOADS
from .verdict import Verdict, compare, quiet_rounds

if TYPE_CHECKING:
    from .jobs import Environment, Measure, Measurement, WorkloadPlan


@dataclass(kw_only=True, slots=True)
class Outcome:
    """The measurements, workload by workload, and what they mean."""

    num_workers: int
    num_cores: int
    is_smoke: bool = False
    """Whether it is too short for ratios and verdicts."""
    environment: Environment | None = None
    plans: dict[str, WorkloadPlan] = field(default_factory=dict)
    rounds: dict[str, dict[str, list[Measurement]]] = field(default_factory=dict)
    """The measurements of each variant of each workload, in the order in which they were made."""

    def add(self, job: Measure, measurement: Measurement) -> None:
        """Keep a measurement."""
        variants = self.rounds.setdefault(job.workload, {})
        variants.setdefault(job.variant, []).append(measurement)

    def measured(self) -> list[str]:
        """Return the workloads that were measured."""
        return list(self.rounds)

    def quiet(self, workload: str) -> dict[str, list[Measurement]]:
        """Return its rounds that other programs did not disturb, or else all of them."""
        return quiet_rounds(self.rounds[workload], self.num_cores)

    def num_left_out(self, workload: str) -> int:
        """Return how many of its turns are left out with a round that other programs disturbed."""
        kept = self.quiet(workload).values()
        return sum(map(len, self.rounds[workload].values())) - sum(map(len, kept))

    def verdict(self, workload: str) -> Verdict | None:
        """Compare torch's loader with ours, with all imports changed and with one; None in a smoke
        run, and until the first and the last variant are measured.
        """
        first, *between, last = WORKLOADS[workload].variants
        rounds = self.quiet(workload)
        if self.is_smoke or first not in rounds or last not in rounds:
            return None
        fewer = {VARIANTS[each].subject: rounds[each] for each in between if each in rounds}
        subject = VARIANTS[last].subject
        return compare(rounds[first], rounds[last], self.num_cores, subject=subject, fewer=fewer)

    def report(self, workload: str) -> Report | None:
        """Return our loader's report on feeding the light network; None in a smoke run, or where no
        turn has reported.
        """
        last = list(self.rounds[workload].values())[-1][-1]
        return None if self.is_smoke or last.report is None else Report.from_dict(last.report)
