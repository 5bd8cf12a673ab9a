"""What trainers need of a loader beside its public methods: the pass that their callbacks see, and
a loader of other samples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ..objects.copies import shallow_copy

if TYPE_CHECKING:
    from torch.utils.data import DataLoader as TorchDataLoader

    from .checkpoint.order import Order
    from .dataloader import DataLoader
    from .stats.stats import EpochStats


class Pass(NamedTuple):
    """What a loader reports and saves of one pass over it."""

    stats: EpochStats | None
    order: Order | None


def pass_of(loader: DataLoader[Any]) -> Pass:
    """Return the running pass, or the last one: of all iterators, that of the last one made."""
    known = loader._state
    return Pass(known.figures.stats, known.position.order)


def go_back_to(loader: DataLoader[Any], earlier: Pass | None) -> bool:
    """Have the loader report and save an earlier pass again, which goes on; return False if it does
    already, or if there is none."""
    known = loader._state
    if earlier is None or earlier.stats is None or known.figures.stats is earlier.stats:
        return False
    known.figures.stats, known.position.order = earlier
    return True


_CHOOSING = (
    *("dataset", "_dataset_kind", "_IterableDataset_len_called", "generator"),
    *("batch_size", "sampler", "batch_sampler", "drop_last"),
)
"""Attributes of torch's loader that such a library may have exchanged. By name they are
read-only."""


def choosing_as(loader: DataLoader[Any], plain: TorchDataLoader[Any], device: Any) -> Any:
    """Return a copy of our loader, of whatever class, whose samples are chosen as by a plain one.

    Not built anew: the constructor of a user's subclass may take anything.
    """
    own = shallow_copy(loader)
    vars(own).update({name: vars(plain)[name] for name in _CHOOSING}, device=device)
    return own
