"""The verdict on a pipeline's statistics, and its profile.

Both are made by ``observe``, which stands above the engine and reads its statistics. The engine
imports it here alone, and only when a user asks for a report.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..machine.readings import Probes
    from ..observe.trace.profile import Profile as Profile
    from ..observe.verdict.report import Report as Report
    from .recorder.timeline import Timeline
    from .stats.perf_stats import PipelineStats


def report_of(stats: PipelineStats, probes: Probes | None) -> Report:
    """Judge a pipeline's statistics, with the readings of the machine meanwhile."""
    from ..observe.verdict.report import make_report

    return make_report(stats, probes)


def profile_of(stats: PipelineStats, probes: Probes | None, timeline: Timeline) -> Profile:
    """Return the report on the statistics together with what every thread did."""
    from ..observe.trace.tracing import profile_of_run

    return profile_of_run(report_of(stats, probes), timeline, None)
