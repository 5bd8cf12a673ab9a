"""The limit on how many tasks of all stages run at once: each task on a thread takes a token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..channel.channel import Channel

if TYPE_CHECKING:
    from ..definition.specs import PipelineSpec


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
    on_threads = (each for each in spec.pipes if each.executor is None and not each.is_async)
    most_tasks = sum(stage.concurrency for stage in on_threads)
    if num_threads >= most_tasks and not adjustable:
        return None
    # A channel, not a semaphore: a stop closes it, which ends the waits of all workers at once.
    task_limit: Channel[None] = Channel(num_threads)
    for _ in range(num_threads):
        task_limit.put(None)
    return task_limit
