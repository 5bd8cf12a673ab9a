"""What a loader makes its batches of, and by which of torch's rules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset

from ...named_tuples import NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from .bad_samples import Tolerance


class BatchRecipe(NamedTuple):
    """The dataset of a loader and how its samples become batches; a worker has a copy of it with
    its own dataset and functions."""

    dataset: Any
    collate_fn: Callable[[Any], Any]
    auto_collation: bool
    drop_last: bool
    tolerance: Tolerance | None = None
    """The treatment of samples that fail; None = the batch fails with them."""

    @property
    def iterable(self) -> bool:
        """Whether the dataset gives its samples itself, without indices."""
        return isinstance(self.dataset, IterableDataset)
