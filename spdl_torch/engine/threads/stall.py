"""Wait, and report each time the wait gets long, so that nobody needs a debugger for a hang."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

STALL_SECONDS = 60.0
"""The wait after which the first report comes; the next ones each time the wait has doubled."""


def warn_when_stalled(get: Callable[[float], T], warn: Callable[[float], None]) -> T:
    """Call ``get(seconds)`` until it does not time out; call ``warn(seconds waited)`` each time."""
    try:
        return get(STALL_SECONDS)
    except TimeoutError:
        pass
    return warn_again(get, warn, STALL_SECONDS)


def warn_again(get: Callable[[float], T], warn: Callable[[float], None], waited: float) -> T:
    """Warn, and go on waiting; for a caller that has itself waited ``waited`` seconds in vain."""
    while True:
        warn(waited)
        try:
            return get(waited)
        except TimeoutError:
            waited += waited
