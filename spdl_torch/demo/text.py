"""The text that the demo prints at its end, made from its measurements."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..observe.verdict.report import stage_lines
from ..shown_text import counted, wrapped
from .jobs import WORKLOADS
from .table import comparison_table, waiting_table
from .verdict import bottleneck, noises

if TYPE_CHECKING:
    from .outcome import Outcome

WHEN_IT_WAITS = (
    "By loading alone: for a model that leaves the cores to the loader, as one on a GPU does."
)


def title_of(workload: str) -> str:
    """Return what the workload is, and how its batches are made."""
    return f"{WORKLOADS[workload].title}: {WORKLOADS[workload].about}"


def amounts(outcome: Outcome, workload: str) -> str:
    """Return how much each run does."""
    plan = outcome.plans[workload]
    epochs = "" if plan.epochs == 1 else f"{plan.epochs} epochs of "
    return (
        f"A turn: {plan.loading_images:,} images alone and {epochs}{plan.light_images:,} for the "
        f"light network, {plan.crop_pixels} x {plan.crop_pixels} pixels in batches of "
        f"{plan.batch_size}; {epochs}{plan.resnet_images:,} for resnet18, "
        f"{plan.resnet_crop_pixels} x {plan.resnet_crop_pixels} in batches of "
        f"{plan.resnet_batch_size}"
    )


def workload_text(outcome: Outcome, workload: str) -> str:
    """Return the tables of a workload."""
    quiet = outcome.quiet(workload)
    parts = [wrapped(title_of(workload)), wrapped(amounts(outcome, workload))]
    if num_left_out := outcome.num_left_out(workload):
        parts.append(
            f"{counted(num_left_out, 'turn')} left out: other programs were busy meanwhile"
        )
    parts += ["", comparison_table(quiet, with_ratio=not outcome.is_smoke)]
    if outcome.is_smoke:  # too short for what follows to mean anything
        return "\n".join(parts)
    if noise := noise_text(outcome, workload):
        parts.append(wrapped(noise))
    return "\n".join([*parts, "", waiting_table(quiet), WHEN_IT_WAITS])


def noise_text(outcome: Outcome, workload: str) -> str:
    """Return how sure the ratios are; "" where nothing was repeated."""
    noise = noises(outcome.quiet(workload))
    if not noise:
        return ""
    parts = ", ".join(f"{100 * ratio:.0f} % {what}" for what, ratio in noise.items())
    return f"Noise: by how its pairs differ, a ratio may be off by up to {parts}."


def ending_text(outcome: Outcome) -> str:
    """Return our loader's stages, and the verdicts."""
    if outcome.is_smoke:
        return "The smoke run is too short to compare. Next: leave out --smoke."
    parts = []
    *_, last = outcome.measured()
    if report := outcome.report(last):
        parts += [
            f"Our loader's stages while it feeds the light network ({last})",
            *stage_lines(report, has_notes=False),
            wrapped(bottleneck(report)),
            "",
        ]
    for workload in outcome.measured():
        if verdict := outcome.verdict(workload):
            parts.append(wrapped(verdict.finding, f"{WORKLOADS[workload].title + ':':13}"))
            parts.append(wrapped(verdict.advice, " " * 13))
            parts.append(wrapped(WORKLOADS[workload].why_level, " " * 13))
    return "\n".join(parts)
