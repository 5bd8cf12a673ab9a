"""Wait, and report each time the wait gets long, so that nobody needs a debugger for a hang."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from .channel import WaitIsOver

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

STALL_SECONDS = 60.0
"""The wait after which the first report comes; the next ones each time the wait has doubled."""


def warn_when_stalled(get: Callable[[float], T], warn: Callable[[float], None]) -> T:
    """Call ``get(seconds)`` until it does not raise WaitIsOver; call ``warn(seconds waited)`` each
    time."""
    waited, wait = 0.0, STALL_SECONDS
    while True:
        try:
            return get(wait)
        except WaitIsOver:
            waited += wait
            wait = waited
        warn(waited)
