"""Warnings: at the line of the user's code that is running; and, once for each loader, of worker
threads that the GIL holds up."""

from __future__ import annotations

import logging
import sys
import warnings
from math import inf
from time import perf_counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .stats.stats import EpochStats


_logger = logging.getLogger("spdl_torch.data")

LOOK_SECONDS = 10.0
"""The time of loading on threads before each look at what holds them up."""
_SOON = 0.25
"""The part of that after which it looks again where an epoch was too young to say anything."""


class GilWatch:
    """Looks at the verdict on a loader's threads now and then, until it is the GIL. Only the loop's
    thread calls it."""

    def __init__(self) -> None:
        self._due_seconds = 0.0  # 0.0 = the loop has had no batch yet

    def look(self, stats: EpochStats) -> None:
        """Warn if the GIL holds the threads up; 0.1 µs where no look is due."""
        now = perf_counter()
        if now < self._due_seconds:
            return
        is_first, self._due_seconds = not self._due_seconds, now + LOOK_SECONDS
        if is_first:
            return
        # They judge: no first batch waits for their import.
        from ..observe.verdict.causes import Cause
        from ..observe.verdict.report import action_of

        verdict = stats.report().verdict
        if verdict.cause is Cause.SHORT:
            self._due_seconds = now + LOOK_SECONDS * _SOON
        if verdict.cause is Cause.GIL:
            self._due_seconds = inf
            _logger.warning("DataLoader: %s %s", verdict.finding, action_of(verdict))


# Loaders are also built for the user: by our own commands, by torch's generic classes and by
# trainers, from the attributes of the user's own loader.
_NOT_THE_USERS = frozenset(
    ("spdl_torch", "torch", "lightning", "pytorch_lightning", "accelerate", "transformers")
)

_warned: set[str] = set()


def warn_once(text: str) -> None:
    """Warn at the line of the user's code that is running; each text once per process."""
    if text not in _warned:
        warnings.warn(text, stacklevel=_users_level())
        _warned.add(text)


def warn(text: str) -> None:
    """Warn at the line of the user's code that is running."""
    warnings.warn(text, stacklevel=_users_level())


def _users_level() -> int:
    """Return ``stacklevel`` for ``warnings.warn`` in the caller: the first level of user code."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and _package(frame) in _NOT_THE_USERS:
        frame, level = frame.f_back, level + 1
    return level


def _package(frame: Any) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
