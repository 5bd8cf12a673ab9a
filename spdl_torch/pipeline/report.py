"""Reports and profiles, which a pipeline is asked for and a floor above makes.

The engine imports nothing of the floors above it. Here are the exceptions, imported when they are
first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..observe.trace.profile import Profile as Profile
    from ..observe.verdict.report import Report as Report
    from .pipeline import Pipeline

__all__ = ["profile_of", "report_of"]


def report_of(pipeline: Pipeline[Any]) -> Report:
    """Judge a pipeline's figures."""
    from ..observe.verdict.report import make_report

    return make_report(pipeline.stats())


def profile_of(pipeline: Pipeline[Any]) -> Profile:
    """Return the report together with what every thread did."""
    from ..observe.trace.tracing import profile_of_run

    return profile_of_run(report_of(pipeline), pipeline.timeline(), None)
