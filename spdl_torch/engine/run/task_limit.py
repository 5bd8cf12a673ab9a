"""The limit on how many tasks of all stages run at once: each task on a thread takes a token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..channel.channel import Channel
from ..definition.specs import MergeSpec

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..definition.specs import PipelineSpec, StageSpec


def make_task_limit(
    spec: PipelineSpec[Any], num_threads: int | None, *, adjustable: bool
) -> Channel[None] | None:
    """Return a channel of ``num_threads`` tokens; None where the stages' own limits are lower.

    adjustable: the stages' limits may change.
    Raises: ValueError: ``num_threads`` < 1.
    """
    if num_threads is None:
        return None
    if num_threads < 1:
        raise ValueError(f"build: num_threads must be >= 1 or None, got {num_threads}.")
    if num_threads >= _most_tasks(spec) and not adjustable:
        return None
    # A channel, not a semaphore: a stop closes it, which ends the waits of all workers at once.
    task_limit: Channel[None] = Channel(num_threads)
    for _ in range(num_threads):
        task_limit.put(None)
    return task_limit


def _most_tasks(spec: PipelineSpec[Any]) -> int:
    """Return how many calls could run at once on threads of the pipeline."""
    merged = spec.src.pipeline_configs if isinstance(spec.src, MergeSpec) else ()
    return _of_stages(spec.pipes) + sum(map(_most_tasks, merged))


def _of_stages(stages: Iterable[StageSpec]) -> int:
    return sum(
        (stage.concurrency if stage.executor is None and not stage.is_async else 0)
        + sum(map(_of_stages, stage.paths))
        for stage in stages
    )
