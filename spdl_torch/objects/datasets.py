"""The datasets inside a dataset: torch's Subset and its kin keep theirs as ``dataset``."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from ..handlers import unless_of_handler

# Bounds, should one contain itself.
_MOST = 8
_MOST_DATASETS = 1000


def nested_datasets(dataset: Any) -> Iterator[Any]:
    """Yield the dataset and those inside it, from the outside in."""
    for _ in range(_MOST):
        yield dataset
        try:
            inner = getattr(dataset, "dataset", None)
        except unless_of_handler(Exception):  # the user's property fails; torch would not read it
            return
        if inner is None or inner is dataset:
            return
        dataset = inner


def all_datasets(dataset: Any) -> Iterator[Any]:
    """Yield the dataset, those inside it, and those that it mixes or concatenates."""
    left, number = [dataset], 0
    while left and number < _MOST_DATASETS:
        for each in nested_datasets(left.pop(0)):
            yield each
            number += 1
            several = _own_attribute(each, "datasets")
            if isinstance(several, dict):
                left += several.values()
            elif isinstance(several, list | tuple):
                left += several


def _own_attribute(value: Any, name: str) -> Any:
    """Return an attribute that is the object's own, without calling user code; None = no such.

    Like ``vars(value).get(name)``, but that would create the object's ``__dict__``: from then on
    Python 3.11 and 3.12 read its attributes more slowly.
    """
    if inspect.isdatadescriptor(getattr(type(value), name, None)):  # a property
        return None
    try:
        return object.__getattribute__(value, name)
    except AttributeError:  # __getattr__ is not asked
        return None
