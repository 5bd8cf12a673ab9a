"""What a run makes of a definition's numbers: room between the stages, and a bound over all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .channel import Channel
from .definition import default_buffer_size

if TYPE_CHECKING:
    from .definition import PipelineSpec

__all__ = ["buffer_sizes", "given_buffer_sizes", "make_gate"]


def make_gate(
    spec: PipelineSpec, num_threads: int | None, *, adjustable: bool
) -> Channel[None] | None:
    """Tokens for the bound on running tasks; None where the stages' own bounds are tighter.

    adjustable: the stages' bounds may change.
    """
    own = sum(s.concurrency for s in spec.stages if s.executor is None and not s.is_async)
    if num_threads is not None and num_threads < 1:
        raise ValueError(f"build: num_threads must be >= 1 or None, got {num_threads}.")
    if num_threads is None or (num_threads >= own and not adjustable):
        return None
    gate: Channel[None] = Channel(num_threads)
    for _ in range(num_threads):
        gate.put(None)
    return gate


def buffer_sizes(spec: PipelineSpec) -> list[int]:
    """Capacity of the queue after the source and after each stage."""
    threads = [1, *(stage.concurrency for stage in spec.stages), 1]
    return [
        size or default_buffer_size(max(before, after))
        for size, before, after in zip(given_buffer_sizes(spec), threads, threads[1:], strict=False)
    ]


def given_buffer_sizes(spec: PipelineSpec) -> list[int | None]:
    """What the user said of each queue, the sink's included."""
    return [None, *(stage.buffer_size for stage in spec.stages), spec.sink.buffer_size]
