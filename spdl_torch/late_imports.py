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
from collections.abc import Iterator

from .scopes import scope

_is_off_by_us = False


@scope
def collected_later() -> Iterator[None]:
    """Let no garbage be collected in the block, which only imports. Of several blocks, one within
    another or on several threads, the one that switched the collector off switches it on."""
    global _is_off_by_us
    if not gc.isenabled():
        yield
        return
    try:  # from here on: Ctrl-C may come anywhere
        _is_off_by_us = True
        gc.disable()
        yield
    finally:
        gc.enable()
        _is_off_by_us = False


def _switch_on() -> None:
    """Let a child collect that another thread forked meanwhile: nobody else in it would."""
    global _is_off_by_us
    if _is_off_by_us:
        gc.enable()
        _is_off_by_us = False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_switch_on)
