"""A progress bar on standard error: of one line on a terminal, one line per part elsewhere."""

from __future__ import annotations

import shutil
import sys
import time
from typing import Self

_BAR_CELLS = 12


class ProgressBar:
    """Shows one part at a time: ``begin``, ``advance`` as often as you like, ``end``, which the end
    of a block with it does.

    On a terminal the bar is drawn over itself and removed at the end. In a file or a pipe every
    part is one line, printed when it begins.
    """

    def __init__(self, unit: str = "images") -> None:
        self._stream = sys.stderr
        self._unit = unit
        self._drawing = self._stream.isatty()
        self.label = ""
        self._total = 0
        self._start_time = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def begin(self, label: str, total: int = 0) -> None:
        """Start a part of ``total`` images, or other units; 0 if there is nothing to count."""
        self.label, self._total = label, total
        self._start_time = time.monotonic()
        if self._drawing:
            self.advance(0)
        else:
            amount = f", {total} {self._unit}" if total else ""
            print(f"{label}{amount}", file=self._stream, flush=True)

    def advance(self, done: int) -> None:
        """Show that ``done`` units of the part are done."""
        if not self._drawing:
            return
        columns = shutil.get_terminal_size().columns
        line = render(self.label, done, self._total, time.monotonic() - self._start_time)
        self._stream.write("\r\033[K" + line[: columns - 1])
        self._stream.flush()

    def end(self) -> None:
        """Remove the bar, so that what is printed next starts on a clean line."""
        if self._drawing:
            self._stream.write("\r\033[K")
            self._stream.flush()


def render(label: str, done: int, total: int, seconds: float) -> str:
    """Return ``training [##..........]  96/480  58/s  7 s left``."""
    if total == 0:
        return f"{label} ..."
    filled = _BAR_CELLS * done // total
    bar = "#" * filled + "." * (_BAR_CELLS - filled)
    line = f"{label} [{bar}] {done:{len(str(total))}}/{total}"
    if done and seconds > 0:
        line += f"  {done / seconds:.0f}/s  {seconds * (total - done) / done:.0f} s left"
    return line
