"""The verdict on a pipeline's statistics, and its profile: ``observe`` makes both, and is imported
only when a user asks."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..engine.recorder.timeline import Timeline
    from ..engine.stats.perf_stats import PipelineStats
    from ..machine.readings import Probes
    from ..observe.trace.profile import Profile as Profile
    from ..observe.verdict.report import Report as Report


def report_of(stats: PipelineStats, probes: Probes | None) -> Report:
    """Judge a pipeline's statistics, with the readings of the machine meanwhile."""
    from ..observe.verdict.report import make_report

    return make_report(stats, probes)


def profile_of(stats: PipelineStats, probes: Probes | None, timeline: Timeline) -> Profile:
    """Return the report on the statistics together with what every thread did."""
    from ..observe.trace.tracing import profile_of_run

    return profile_of_run(report_of(stats, probes), timeline, None)
