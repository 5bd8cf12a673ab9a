"""The lock of every ``with`` in the package, and what a forked process does to begin."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import TypeVar

if sys.version_info[:2] == (3, 14):
    import _thread

    class RLock(_thread.RLock):
        """A lock that no signal's handler leaves held by raising between ``with`` and its block:
        3.14 alone looks for signals there, after the call (GH-148874). A property is no call.
        """

        __slots__ = ()
        _taken = property(_thread.RLock.acquire)

        def __enter__(self) -> bool:
            return self._taken

else:
    RLock = threading.RLock

_Call = TypeVar("_Call", bound=Callable[[], object])


def in_forked_child(function: _Call) -> _Call:
    """Decorate a function that every child calls which is forked from now on, as it begins."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)
    return function
