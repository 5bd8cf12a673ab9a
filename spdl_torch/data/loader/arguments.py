"""Refuse arguments of the wrong type, and warn at the line of the user's code."""

from __future__ import annotations

import inspect
import numbers
import sys
import warnings
from collections.abc import Mapping
from typing import Any

from torch.utils.data import IterableDataset

from ...autotune.workers import AutoWorkers
from ...errors import UnsupportedOptionError

__all__ = ["check_arguments", "refuse_foreign_state", "warn_once"]

# Loaders are also built for the user: by our own commands, by torch's generic classes and by
# trainers, from the attributes of the user's own loader.
_NOT_THE_USERS = frozenset(
    ("spdl_torch", "torch", "lightning", "pytorch_lightning", "accelerate", "transformers")
)

_warned: set[str] = set()


def check_arguments(
    dataset: object,
    *,
    num_workers: Any,
    timeout: Any,
    prefetch_factor: Any,
    sampler: object,
    batch_sampler: object,
    collate_fn: object,
    worker_init_fn: object,
    snapshot_every_n_steps: Any,
) -> None:
    """Refuse values of the wrong type on which torch would fail later, or less clearly.

    Values that torch refuses with a clear message, such as ``num_workers=-1``, are left to it.
    Raises: TypeError; UnsupportedOptionError.
    """
    if not (isinstance(num_workers, AutoWorkers) or _is_integer(num_workers)):
        raise TypeError(
            f'DataLoader: num_workers must be an integer >= 0 or "auto", got {num_workers!r}. '
            "0 loads in the calling thread."
        )
    if not isinstance(timeout, numbers.Real):
        raise TypeError(
            f"DataLoader: timeout must be a number of seconds >= 0, got {timeout!r}. "
            "0 waits for ever."
        )
    if prefetch_factor is not None and not _is_integer(prefetch_factor):
        raise TypeError(
            "DataLoader: prefetch_factor must be an integer >= 1 (batches for each worker) or "
            f"None, got {prefetch_factor!r}."
        )
    for name, order in (("sampler", sampler), ("batch_sampler", batch_sampler)):
        # Accept any object that may stand in for one, such as a mock in a trainer's tests.
        if isinstance(order, type | numbers.Number) or inspect.isfunction(order):
            raise TypeError(f"DataLoader: {name} must be iterable, got {order!r}.")
    for name, function in (("collate_fn", collate_fn), ("worker_init_fn", worker_init_fn)):
        if function is not None and not callable(function):
            raise TypeError(f"DataLoader: {name} must be a function or None, got {function!r}.")
    if not isinstance(dataset, IterableDataset) and not any(
        hasattr(dataset, name) for name in ("__getitem__", "__getitems__", "__len__")
    ):
        raise TypeError(
            "DataLoader: dataset must have __getitem__ and __len__, or be an IterableDataset, got "
            f"{type(dataset).__name__}. Put an iterator into an IterableDataset that makes it anew "
            "in each __iter__."
        )
    if snapshot_every_n_steps != 1:
        raise UnsupportedOptionError(
            f"DataLoader: snapshot_every_n_steps={snapshot_every_n_steps!r} is torchdata's. Leave "
            "it out: state_dict() is exact after every batch, and no snapshots are taken."
        )


def refuse_foreign_state(state: object) -> None:
    """Refuse a state of torchdata's loader, and say what to do instead. Raises: ValueError."""
    if isinstance(state, Mapping) and not {"_snapshot", "_num_yielded"}.isdisjoint(state):
        raise ValueError(
            "load_state_dict: this is a state of torchdata's StatefulDataLoader. Finish its epoch "
            "with that loader, or begin the epoch anew with this one."
        )


def _is_integer(value: object) -> bool:
    return isinstance(value, numbers.Integral)


def warn_once(text: str) -> None:
    """Warn at the line of the user's code that is running; each text once per process."""
    if text not in _warned:
        warnings.warn(text, stacklevel=_users_level())
        _warned.add(text)


def _users_level() -> int:
    """Return ``stacklevel`` for ``warnings.warn`` in the caller: the first level of user code."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and _package(frame) in _NOT_THE_USERS:
        frame, level = frame.f_back, level + 1
    return level


def _package(frame: Any) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
