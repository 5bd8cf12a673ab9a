"""Imports that happen in the middle of a user's program, without setting off the collector.

A module makes thousands of objects that live on. Python counts them, collects garbage every 700 of
them, and after some such collections goes through everything: 100 to 250 ms over what torch's
import left, in the first ``iter()`` of a loader. None of it is garbage. So collections wait for the
end of an import, and count as one.

The collector's switch is the process's: another thread that switches it off within these 50 ms
finds it on afterwards.
"""

from __future__ import annotations

import gc
import os
import threading
from typing import TYPE_CHECKING

from .scopes import scope

if TYPE_CHECKING:
    from collections.abc import Iterator


class _Waiting:
    """The imports that are under way, and whether the collector was on before the first."""

    def __init__(self) -> None:
        # Re-entrant: a collection on a thread that holds it may run a finalizer that imports.
        self.lock = threading.RLock()
        self.number = 0
        self.was_on = False

    def begin(self) -> None:
        with self.lock:
            if not self.number:
                self.was_on = gc.isenabled()
                gc.disable()
            self.number += 1

    def end(self) -> None:
        with self.lock:
            self.number -= 1
            if not self.number and self.was_on:
                gc.enable()


_waiting = _Waiting()


@scope
def collected_later() -> Iterator[None]:
    """Let no garbage be collected in the block, which only imports."""
    waiting = _waiting
    waiting.begin()
    try:
        yield
    finally:
        waiting.end()


def _forget_parent() -> None:
    """Begin anew in a child that another thread forked meanwhile: nobody else ends its wait."""
    global _waiting
    if _waiting.number and _waiting.was_on:
        gc.enable()
    _waiting = _Waiting()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_parent)
