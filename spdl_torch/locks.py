"""The lock of every ``with`` in the package."""

from __future__ import annotations

import sys
import threading

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
