"""The report in a notebook's cell, refreshed while an epoch runs."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any, Protocol

from ...engine.threads.thread_group import ThreadGroup
from ...scopes import scope

if TYPE_CHECKING:
    from collections.abc import Iterator

_logger = logging.getLogger("spdl_torch.observe")


class _Reporting(Protocol):
    def report(self) -> Any:
        """Return something that a notebook can show."""
        ...


@scope
def showing(loader: _Reporting, *, interval_seconds: float = 2.0) -> Iterator[None]:
    """Show ``loader.report()`` in the notebook cell that runs the block, and refresh it there until
    the block ends, also by an exception; the last report stays in the cell.

    The loop is not held up: a thread makes the reports. An error in one is logged, and the next one
    comes when the block ends. Where there are no statistics yet, the cell says so.

    loader: a ``DataLoader``, a ``PipelineDataset``, or anything else with a ``report()``.
    interval_seconds: the time between two reports.
    Raises: ModuleNotFoundError: IPython is not installed, so this is not a notebook; ValueError:
        interval_seconds is not above 0.
    """
    if not interval_seconds > 0:
        raise ValueError(f"showing: interval_seconds must be > 0, got {interval_seconds!r}.")
    try:
        from IPython.display import display
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "showing needs a notebook, and IPython is not installed. In a terminal, use "
            "`python -m spdl_torch watch` on a statistics file, or print(loader.report())."
        ) from error
    handle: Any = display(_shown(loader), display_id=True)
    if handle is None:  # IPython is installed but not running: the report has been printed
        yield
        return
    is_over = threading.Event()

    def renew() -> None:
        while not is_over.wait(interval_seconds):
            try:
                handle.update(_shown(loader))
            except Exception:
                _logger.exception("showing: the report could not be renewed, and stays as it is")
                return

    threads = ThreadGroup(is_over.set)
    threads.spawn("showing", renew)
    try:
        yield
    finally:
        is_over.set()
        threads.join()
        handle.update(_shown(loader))


class _NoFigures:
    """The reason why there is no report yet."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def __repr__(self) -> str:
        return self._reason


def _shown(loader: _Reporting) -> Any:
    try:
        return loader.report()
    except RuntimeError as reason:  # from a loader without statistics, for now or for good
        return _NoFigures(str(reason))
