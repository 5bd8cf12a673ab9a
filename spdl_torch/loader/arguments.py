"""Refuse arguments that cannot be honoured."""

from __future__ import annotations

import numbers
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset, IterDataPipe, MapDataPipe

from ..autotune.workers import AutoWorkers
from ..errors import UnsupportedOptionError
from .backends.transfer_stage import check_device

if TYPE_CHECKING:
    from .dataloader import DataLoader


_CHOICES = {
    "isolation": ("auto", "thread", "process"),
    "rng": ("sample", "worker"),
    "on_error": ("raise", "skip"),
}


def check_options(loader: DataLoader[Any], dataset: object, num_workers: Any) -> None:
    """Refuse what this release cannot honour, and say what to do instead; and what torch would fail
    on later. Negative numbers of workers are left to it.

    Raises: TypeError; UnsupportedOptionError; what ``check_device`` raises.
    """
    if not isinstance(num_workers, AutoWorkers | numbers.Integral):
        raise TypeError(
            f'DataLoader: num_workers must be an integer >= 0 or "auto", got {num_workers!r}. '
            "0 loads in the calling thread."
        )
    if isinstance(dataset, IterDataPipe | MapDataPipe):
        raise UnsupportedOptionError(
            f"DataLoader: dataset must not be a DataPipe, got {type(dataset).__name__}. torch has "
            "deprecated DataPipes; pass a Dataset or an IterableDataset."
        )
    check_device(loader.device)
    for name, choices in _CHOICES.items():
        if (given := getattr(loader, name)) not in choices:
            *others, last = (f'"{each}"' for each in choices)
            listed = f"{', '.join(others)} or {last}"
            raise UnsupportedOptionError(f"DataLoader: {name} must be {listed}, got {given!r}.")
    if loader.isolation == "process" and num_workers == 0:
        raise UnsupportedOptionError(
            'DataLoader: isolation="process" has no effect with num_workers=0, which loads in the '
            "calling thread. Pass num_workers=1 or more, or leave isolation out."
        )
    seed: Any = loader.seed
    if not (seed is None or _is_integer(seed)):
        raise UnsupportedOptionError(
            f"DataLoader: seed must be an integer or None, got {seed!r}. With None the random "
            "streams are seeded from generator=, as in torch."
        )
    if seed is not None and loader.rng == "worker" and num_workers == 0:
        raise UnsupportedOptionError(
            f'DataLoader: seed={seed!r} has no effect with rng="worker" and num_workers=0: there '
            "torch draws from the global generators. Leave rng out, or seed with "
            "torch.manual_seed()."
        )
    _check_error_options(loader, dataset)


def _check_error_options(loader: DataLoader[Any], dataset: object) -> None:
    """Refuse options for bad samples that contradict each other. Raises: UnsupportedOptionError."""
    error_budget, replace = loader.error_budget, loader.replace
    if loader.on_error == "raise" and (error_budget is not None or replace):
        given = f"error_budget={error_budget!r}" if error_budget is not None else "replace=True"
        raise UnsupportedOptionError(
            f'DataLoader: {given} has no effect with on_error="raise". Pass on_error="skip", or '
            "leave it out."
        )
    if not (error_budget is None or _is_count(error_budget) or _is_share(error_budget)):
        raise UnsupportedOptionError(
            "DataLoader: error_budget must be a count >= 0 or a share above 0 and up to 1.0, got "
            f"{error_budget!r}."
        )
    if replace and not isinstance(dataset, IterableDataset) and not hasattr(dataset, "__len__"):
        raise UnsupportedOptionError(
            "DataLoader: replace=True needs a dataset with a length, to know which sample is the "
            f"next; {type(dataset).__name__} has none. Give it __len__, or leave replace out."
        )


def _is_integer(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_integer(value) and value >= 0


def _is_share(value: Any) -> bool:  # a Fraction is Rational
    is_number = isinstance(value, float | numbers.Rational) and value is not True
    return is_number and 0 < float(value) <= 1
