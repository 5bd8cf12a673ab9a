"""What a trainer's callback needs of a loader beside its public methods."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..workers.stats import EpochStats
    from .base_loader import BaseLoader


def want_states(loader: BaseLoader[Any], *, before_last: bool) -> None:
    """Have the loader collect states from now on. ``before_last``: also those from before its last
    batch, for ``_state_before_last``."""
    loader._state.position.want(before=before_last)


def undo_look_ahead(loader: BaseLoader[Any]) -> None:
    """Put the user's generators back, for a trainer that leaves a resumed epoch before its first
    batch; see ``LoaderPosition``."""
    loader._state.position.undo_look_ahead(loader)


def nothing_was_left(loader: BaseLoader[Any]) -> bool:
    """Return whether the loader's last epoch was resumed after its last batch."""
    progress = loader._state.position.progress
    return progress is not None and progress.begun.nothing_left


def measured_by(loader: BaseLoader[Any]) -> EpochStats | None:
    """Return the statistics that the loader reports: of the running epoch, or of the last one."""
    return loader._state.figures.stats


def report_again(loader: BaseLoader[Any], measured: EpochStats | None) -> bool:
    """Have the loader report statistics of an earlier epoch again; return False if it does already,
    or if there are none."""
    if measured is None or measured_by(loader) is measured:
        return False
    loader._state.figures.stats = measured
    return True
