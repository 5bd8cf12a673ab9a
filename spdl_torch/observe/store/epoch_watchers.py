"""Objects, such as a recording, that are told when a loader ends an epoch and begins another.

Who watches is kept here and not on the loader, which is the user's: its copies have no watchers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from ...scopes import scope

EpochWatcher = Callable[[], AbstractContextManager[None]]
"""Opened by a loader when it ends an epoch and begins another; closed when that is done."""

_watchers: dict[int, tuple[EpochWatcher, ...]] = {}
"""Those of each loader, by its ``id``: ``watched`` holds the loader as long as it has any."""


def watchers_of(source: Any) -> tuple[EpochWatcher, ...]:
    """Return those who are told of a loader's epochs."""
    return _watchers.get(id(source), ())


@scope
def watched(source: Any, watcher: EpochWatcher) -> Iterator[None]:
    """Have a loader tell ``watcher`` of every new epoch; one that is not ours tells nothing."""
    _watchers[id(source)] = (*watchers_of(source), watcher)
    try:
        yield
    finally:
        if left := tuple(each for each in watchers_of(source) if each is not watcher):
            _watchers[id(source)] = left
        else:
            _watchers.pop(id(source), None)


@scope
def between_epochs(source: Any) -> Iterator[None]:
    """Run the block, which ends a loader's epoch and begins another, with its watchers."""
    with ExitStack() as stack:
        for watcher in watchers_of(source):
            stack.enter_context(watcher())
        yield
