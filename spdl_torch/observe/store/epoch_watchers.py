"""Objects, such as a recording, that are told when a loader ends an epoch and begins another."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING

from ...scopes import scope

if TYPE_CHECKING:
    from collections.abc import Iterator

EpochWatcher = Callable[[], AbstractContextManager[None]]
"""Opened by a loader when it ends an epoch and begins another; closed when that is done."""


@scope
def between_epochs(watchers: tuple[EpochWatcher, ...]) -> Iterator[None]:
    """Run the block, which ends a loader's epoch and begins another, with its watchers."""
    with ExitStack() as stack:
        for watcher in watchers:
            stack.enter_context(watcher())
        yield
