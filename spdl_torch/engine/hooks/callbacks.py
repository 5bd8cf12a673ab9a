"""The interval callbacks of users: whether one has any effect, how it is called, and how often."""

from __future__ import annotations

import inspect
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from .context_managers import LazyRunner

_logger = logging.getLogger("spdl_torch.pipeline")


def is_heard(callback: Callable[..., Any], default: Callable[..., Any]) -> bool:
    """Return whether a callback is not the default, which logs at INFO level, or that level is
    logged.
    """
    is_default = getattr(callback, "__func__", None) is default
    return not is_default or _logger.isEnabledFor(logging.INFO)


def call_back(
    callback: Callable[[Any], Awaitable[None] | None], stats: Any, who: object, runner: LazyRunner
) -> None:
    """Run a user's callback, awaiting it on the runner's loop if needed. Its error is logged, never
    fatal.
    """
    try:
        result = callback(stats)
        if inspect.isawaitable(result):
            runner.run(_await(result))
    except Exception:
        _logger.exception("%s: interval_stats_callback failed; the pipeline goes on.", who)


async def _await(result: Awaitable[None]) -> None:
    await result


def check_interval(interval: float | None, where: object) -> float | None:
    """Return the interval; SPDL's -1 means None, and stays -1 for subclasses that compare it.

    Raises: ValueError: 0, or a negative number other than -1.
    """
    if interval is not None and interval <= 0 and interval != -1:
        raise ValueError(f"{where} must be > 0 seconds or None, got {interval}.")
    return interval
