"""The memory of a loader between epochs."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from ..workers.moving import Moving
from .loader_figures import LoaderFigures
from .loader_position import LoaderPosition

if TYPE_CHECKING:
    from ...autotune.tuning import TuningState
    from ...io._transfer.kept import TransferKeeper
    from ...observe.verdict.placement import Placement

_logger = logging.getLogger("spdl_torch.data")


class LoaderState:
    """The memory of one loader, written by its iterators. A copy of the loader begins without."""

    def __init__(self) -> None:
        self.position = LoaderPosition()
        self.figures = LoaderFigures()
        self._iterators: WeakSet[Any] | None = None  # none yet: a loader without any is pickled
        self._num_processes: int | None = None
        self.moving = Moving()
        self.keeper: TransferKeeper | None = None
        """The owner of pinned memory between epochs; None = no epoch went to a device."""
        self.tuning: TuningState | None = None
        """The findings of ``num_workers="auto"`` so far."""

    def add(self, iterator: Any) -> None:
        """Know an ``EpochIterator`` for as long as somebody holds it, and report what it
        measures."""
        if self._iterators is None:
            self._iterators = WeakSet()
        self._iterators.add(iterator)
        self.figures.stats = iterator.stats()

    def iterators(self) -> list[Any]:
        """Return the iterators of the loader that somebody still holds."""
        return list(self._iterators or ())

    def log_placement(self, placement: Placement) -> None:
        """Log where the workers live, once and whenever that changes, except by a move, which was
        logged."""
        is_new = placement.num_processes != self._num_processes
        self._num_processes = placement.num_processes
        if is_new and not self.moving.is_settled:
            _logger.info("DataLoader: the workers live %s", placement)
