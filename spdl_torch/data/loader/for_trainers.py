"""What trainers need of a loader beside its public methods: functions for their callbacks, and the
mark by which Accelerate's ``prepare`` leaves it alone."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any

from ...named_tuples import NamedTuple

if TYPE_CHECKING:
    from ..checkpoint.progress import Progress
    from ..workers.stats import EpochStats
    from .base_loader import BaseLoader


class Pass(NamedTuple):
    """What a loader reports and saves of one pass over it."""

    stats: EpochStats | None
    progress: Progress | None


def pass_of(loader: BaseLoader[Any]) -> Pass:
    """Return the running pass, or the last one: of all iterators, that of the last one made."""
    known = loader._state
    return Pass(known.figures.stats, known.position.progress)


def go_back_to(loader: BaseLoader[Any], earlier: Pass | None) -> bool:
    """Have the loader report and save an earlier pass again, which goes on; return False if it does
    already, or if there is none."""
    known = loader._state
    if earlier is None or earlier.stats is None or known.figures.stats is earlier.stats:
        return False
    known.figures.stats, known.position.progress = earlier
    return True


_logger = logging.getLogger("spdl_torch.data")


class AcceleratePrepared:
    """A loader's attribute ``_is_accelerate_prepared``; False unless it is set.

    Accelerate reads it right before it replaces the loader by a plain DataLoader. Nothing else
    shows that this is about to happen, so the read logs a warning, once per process. To have a
    loader replaced without the warning, set the mark to False first.
    """

    _has_logged = False

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, loader: Any, owner: type | None = None) -> bool:
        mark = None if loader is None else loader.__dict__.get(self._name)
        if mark is None and not AcceleratePrepared._has_logged and _caller() == "accelerate":
            AcceleratePrepared._has_logged = True
            _logger.warning(
                "accelerator.prepare() puts torch's DataLoader, with worker processes, in place of "
                "spdl_torch.DataLoader. To keep it: from spdl_torch.accelerate import Accelerator"
            )
        return bool(mark)

    def __set__(self, loader: Any, mark: bool) -> None:
        loader.__dict__[self._name] = mark


def _caller() -> str:
    """Return the package of the code that reads the attribute."""
    return str(sys._getframe(2).f_globals.get("__name__", "")).partition(".")[0]
