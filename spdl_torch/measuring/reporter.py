"""The reports of a measuring process: JSON lines on its standard output.

``{"phase", "total"}`` when a part begins, ``{"done"}`` while it goes on, ``{"answer"}`` at its end.
"""

from __future__ import annotations

import json
import time
from typing import TextIO

_SECONDS_BETWEEN_LINES = 0.1


class Reporter:
    """Writes the lines; at most ten a second, so that reporting costs nothing."""

    def __init__(self, lines: TextIO) -> None:
        self._lines = lines
        self._next_time = 0.0

    def phase(self, name: str, total: int) -> None:
        """Begin a part of ``total`` samples; 0 if there is nothing to count."""
        self.write(phase=name, total=total)

    def done(self, count: int) -> None:
        """Report that ``count`` samples of the part are done."""
        now = time.monotonic()
        if now >= self._next_time:
            self._next_time = now + _SECONDS_BETWEEN_LINES
            self.write(done=count)

    def write(self, **fields: object) -> None:
        """Send one line at once."""
        print(json.dumps(fields), file=self._lines, flush=True)
