"""Objects, such as a recording, that are told when a loader ends an epoch and begins another."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any

from ...scopes import scope

if TYPE_CHECKING:
    from collections.abc import Iterator

EpochWatcher = Callable[[], AbstractContextManager[None]]
"""Opened by a loader when it ends an epoch and begins another; closed when that is done."""


@scope
def watched(source: Any, watcher: EpochWatcher) -> Iterator[None]:
    """Have a loader tell ``watcher`` of every new epoch; one that is not ours tells nothing."""
    if not hasattr(source, "_epoch_watchers"):
        yield
        return
    source._epoch_watchers = (*source._epoch_watchers, watcher)
    try:
        yield
    finally:
        left = tuple(each for each in source._epoch_watchers if each is not watcher)
        source._epoch_watchers = left


@scope
def between_epochs(watchers: tuple[EpochWatcher, ...]) -> Iterator[None]:
    """Run the block, which ends a loader's epoch and begins another, with its watchers."""
    with ExitStack() as stack:
        for watcher in watchers:
            stack.enter_context(watcher())
        yield
