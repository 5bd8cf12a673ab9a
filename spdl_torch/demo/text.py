"""The text that the demo prints at its end, made from its measurements."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from ..measuring.progress_bar import counted
from .jobs import WORKLOADS
from .table import comparison_table, stage_table, waiting_table
from .verdict import noise_of

if TYPE_CHECKING:
    from .outcome import Outcome

COLUMNS = 99
"""The width of a terminal, less one."""

WHEN_IT_WAITS = (
    "By loading alone: for a model that leaves the cores to the loader, as one on a GPU does."
)


def title_of(workload: str) -> str:
    """Return what the workload is, and how its batches are made."""
    return f"{WORKLOADS[workload].title}: {WORKLOADS[workload].about}"


def amounts(outcome: Outcome, workload: str) -> str:
    """Return how much each run does."""
    plan = outcome.plans[workload]
    epochs = "" if plan.epochs == 1 else f" in {plan.epochs} epochs"
    return (
        f"{plan.crop_pixels} x {plan.crop_pixels} pixels for the networks, batches of "
        f"{plan.batch_size}; {plan.loading_images:,} images alone, "
        f"{plan.light_images * plan.epochs:,} for the light network, "
        f"{plan.resnet_images * plan.epochs:,} for resnet18{epochs}"
    )


def workload_text(outcome: Outcome, workload: str) -> str:
    """Return the tables of a workload."""
    quiet = outcome.quiet(workload)
    parts = [_wrapped("", title_of(workload)), _wrapped("", amounts(outcome, workload))]
    if num_left_out := outcome.num_left_out(workload):
        parts.append(f"{counted(num_left_out, 'run')} left out: other programs were busy meanwhile")
    parts += ["", comparison_table(quiet, with_ratio=not outcome.is_smoke)]
    if outcome.is_smoke:  # too short for what follows to mean anything
        return "\n".join(parts)
    if noise := noise_text(outcome, workload):
        parts.append(_wrapped("", noise))
    return "\n".join([*parts, "", waiting_table(quiet), WHEN_IT_WAITS])


def noise_text(outcome: Outcome, workload: str) -> str:
    """Return how large a difference must be to count; "" where nothing was repeated."""
    noise = noise_of(outcome.quiet(workload))
    if noise is None:
        return ""
    return (
        f"Noise: rounds of one and the same loader differ by up to {100 * noise:.0f} % in loading "
        "alone; between loaders, less than that means nothing."
    )


def ending_text(outcome: Outcome) -> str:
    """Return our loader's stages, and the verdicts."""
    if outcome.is_smoke:
        return "The smoke run is too short to compare. Next: leave out --smoke."
    parts = []
    *_, last = outcome.measured()
    if found := outcome.stages(last):
        stages, bottleneck = found
        parts += [
            f"Our loader's stages while it feeds the light network ({last})",
            stage_table(stages),
            _wrapped("", f"{bottleneck.finding} {bottleneck.advice}"),
            "",
        ]
    for workload in outcome.measured():
        if verdict := outcome.verdict(workload):
            parts.append(_wrapped(f"{WORKLOADS[workload].title + ':':13}", verdict.finding))
            parts.append(_wrapped(" " * 13, verdict.advice))
    return "\n".join(parts)


def _wrapped(label: str, text: str) -> str:
    return textwrap.fill(text, COLUMNS, initial_indent=label, subsequent_indent=" " * len(label))
