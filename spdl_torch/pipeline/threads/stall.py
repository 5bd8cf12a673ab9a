"""Wait, and report each time the wait gets long, so that nobody needs a debugger for a hang."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["told_when_long"]

T = TypeVar("T")

STALL_SECONDS = 60.0
"""The wait after which the first report comes; the next ones each time the wait has doubled."""


def told_when_long(get: Callable[[float], T], tell: Callable[[float], None]) -> T:
    """Call ``get(seconds)`` until it does not time out; call ``tell(seconds waited)`` each time."""
    waited, patience = 0.0, STALL_SECONDS
    while True:
        try:
            return get(patience)
        except TimeoutError:
            waited += patience
            patience = waited
        tell(waited)
