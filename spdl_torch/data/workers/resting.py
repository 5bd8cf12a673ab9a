"""Workers between two epochs, who may go on without their threads until the next one."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Rest:
    """The time between two epochs of workers that keep nothing on their threads.

    Another loader's thread may let the threads go, while the loop's thread begins or ends the rest.
    """

    def __init__(self) -> None:
        # Re-entrant: Ctrl-C's handler may iterate, too.
        self._lock = threading.RLock()
        self._has_begun = self._is_retired = False

    def begin(self) -> None:
        """Let others retire the threads from now on."""
        with self._lock:
            self._has_begun = True

    def retire(self, let_go: Callable[[], None]) -> None:
        """Call ``let_go``, once in a rest, and not after its end. Never blocks."""
        with self._lock:
            if self._has_begun and not self._is_retired:
                self._is_retired = True
                let_go()

    def end(self) -> bool:
        """Keep the threads from now on; return whether they were let go."""
        with self._lock:
            was_retired, self._has_begun, self._is_retired = self._is_retired, False, False
        return was_retired
