"""A wait that is told of when it is long: what hangs is named without a debugger."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["told_when_long"]

T = TypeVar("T")

STALL_SECONDS = 60.0
"""Of waiting, from which it is told; then each time that the wait has become twice as long."""


def told_when_long(get: Callable[[float], T], tell: Callable[[float], None]) -> T:
    """``get(seconds)`` until it does not raise TimeoutError; ``tell(seconds waited)`` each time."""
    waited, patience = 0.0, STALL_SECONDS
    while True:
        try:
            return get(patience)
        except TimeoutError:
            waited += patience
            patience = waited
        tell(waited)
