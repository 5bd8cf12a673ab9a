"""Batches of a TensorDataset by one call for each tensor instead of one for each row.

torch takes the rows one by one and stacks them again. For plain tensors under torch's own collate
function the outcome is that of indexing with all row numbers at once, at a tenth of the time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Subset, TensorDataset, default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["RowBatch", "RowReader", "is_torchs_collate", "row_reader"]


class RowBatch(list[torch.Tensor]):
    """Samples that are one batch already: a tensor for each of the dataset's."""

    @property
    def collated(self) -> list[torch.Tensor]:
        """As ``default_collate`` returns it."""
        return list(self)


class RowReader:
    """Reads rows of a TensorDataset, or of a Subset of one by way of its ``indices``."""

    def __init__(self, tensors: Sequence[torch.Tensor], indices: Sequence[int] | None) -> None:
        self._tensors = tensors
        self._indices = indices

    def numbers(self, index: Any) -> torch.Tensor | None:
        """The rows of an index; None if they do not all exist, or it is none of plain numbers: a
        bool or a slice would say something else.
        """
        if not isinstance(index, list | tuple) or set(map(type, index)) != {int}:
            return None
        if self._indices is not None:
            try:
                return RowReader(self._tensors, None).numbers([self._indices[n] for n in index])
            except IndexError:
                return None
        num_rows = len(self._tensors[0])
        if max(index) >= num_rows or min(index) < -num_rows:
            return None
        return torch.tensor(index, dtype=torch.int64)

    def read(self, numbers: torch.Tensor) -> RowBatch:
        """The batch of these rows."""
        return RowBatch(tensor[numbers].contiguous() for tensor in self._tensors)


def is_torchs_collate(collate_fn: Any) -> bool:
    """Whether this is ``default_collate``, and the user has added nothing to it."""
    functions = default_collate_fn_map.values()
    return collate_fn is default_collate and all(
        getattr(function, "__module__", None) == default_collate.__module__
        for function in functions
    )


def row_reader(dataset: Any, collate_fn: Any) -> RowReader | None:
    """None where the outcome might differ in anything from that of torch's way."""
    if not is_torchs_collate(collate_fn):
        return None
    indices = None
    if type(dataset) is Subset:
        dataset, indices = dataset.dataset, dataset.indices
    if type(dataset) is not TensorDataset or not all(map(_is_plain, dataset.tensors)):
        return None
    return RowReader(dataset.tensors, indices)


def _is_plain(tensor: Any) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_quantized or tensor.requires_grad)
        and not (tensor.is_conj() or tensor.is_neg())
    )
