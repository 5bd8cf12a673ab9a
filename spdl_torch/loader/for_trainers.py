"""What trainers' callbacks need of a loader beside its public methods."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from .base_loader import BaseLoader
    from .checkpoint.order import Order
    from .stats.stats import EpochStats


class Pass(NamedTuple):
    """What a loader reports and saves of one pass over it."""

    stats: EpochStats | None
    order: Order | None


def pass_of(loader: BaseLoader[Any]) -> Pass:
    """Return the running pass, or the last one: of all iterators, that of the last one made."""
    known = loader._state
    return Pass(known.figures.stats, known.position.order)


def go_back_to(loader: BaseLoader[Any], earlier: Pass | None) -> bool:
    """Have the loader report and save an earlier pass again, which goes on; return False if it does
    already, or if there is none."""
    known = loader._state
    if earlier is None or earlier.stats is None or known.figures.stats is earlier.stats:
        return False
    known.figures.stats, known.position.order = earlier
    return True
