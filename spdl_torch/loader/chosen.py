"""Our loader with the samples that another library's loader of the same dataset would load."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..objects.copies import shallow_copy

if TYPE_CHECKING:
    from torch.utils.data import DataLoader as TorchDataLoader

    from .dataloader import DataLoader

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
