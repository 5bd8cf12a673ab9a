"""The datasets inside a dataset: torch's Subset and its kin keep theirs as ``dataset``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["nested_datasets"]

_MOST = 8  # a bound, should one contain itself


def nested_datasets(dataset: Any) -> Iterator[Any]:
    """Yield the dataset and those inside it, from the outside in."""
    for _ in range(_MOST):
        yield dataset
        try:
            inner = getattr(dataset, "dataset", None)
        except Exception:  # the user's property fails; torch would not read it
            return
        if inner is None or inner is dataset:
            return
        dataset = inner
