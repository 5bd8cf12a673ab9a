"""Create the queues of a run: call ``queue_class`` as SPDL does, and check the result."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

from ..failures import attach_note
from .stats_queue import StatsQueue

if TYPE_CHECKING:
    from collections.abc import Callable

    from .stage_info import StageInfo

    QueueMaker = Callable[[StageInfo, int], StatsQueue]


def queue_maker(
    queue_class: Callable[..., StatsQueue] | None, interval: float | None
) -> QueueMaker:
    """Return the function that creates the queue after a stage: ``make(info, buffer_size)``.

    queue_class: called as ``queue_class(info, buffer_size=n)``; ``interval=`` is passed too where
        one was given to ``build``, the class takes it and a partial has none of its own.
    """
    if queue_class is None:
        return functools.partial(_default_queue, interval)
    options = {"interval": interval} if interval and _takes_interval(queue_class) else {}
    checked: set[type] = set()

    def make(info: StageInfo, buffer_size: int) -> StatsQueue:
        try:
            queue = queue_class(info, buffer_size=buffer_size, **options)
        except Exception as error:
            attach_note(error, f"build: raised by queue_class({info}, buffer_size={buffer_size})")
            raise
        if type(queue) not in checked:
            _check(queue)
            checked.add(type(queue))
        return queue

    return make


def _default_queue(interval: float | None, info: StageInfo, buffer_size: int) -> StatsQueue:
    return StatsQueue(info, buffer_size, interval)


def _takes_interval(queue_class: Callable[..., Any]) -> bool:
    if isinstance(queue_class, functools.partial) and "interval" in queue_class.keywords:
        return False
    try:
        parameters = inspect.signature(queue_class).parameters
    except (TypeError, ValueError):
        return False
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return takes_any or "interval" in parameters


def _check(queue: Any) -> None:
    name = type(queue).__name__
    if not isinstance(queue, StatsQueue):
        raise TypeError(
            f"build: queue_class must make a spdl_torch.pipeline.StatsQueue, got {name}. Subclass "
            "StatsQueue and override interval_stats_callback."
        )
    for method in ("put", "get"):
        own = getattr(type(queue), method)
        if own is getattr(StatsQueue, method):
            continue
        if inspect.iscoroutinefunction(own):
            raise TypeError(
                f"build: {name}.{method} is a coroutine function, and threads use the queues here, "
                "without an event loop. Override interval_stats_callback, which is given the waits "
                f"of put and get; or make {method} a plain method."
            )
        if method == "get":
            raise TypeError(
                f"build: {name}.get would never be called: stages take items by get_numbered("
                "timeout), which returns (number, item). Override that instead."
            )
