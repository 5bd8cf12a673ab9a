"""What makes a thread look like one of torch's worker processes to the user's code."""

from __future__ import annotations

import copy
import logging
import random
import types
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.random import default_rng  # numpy loads it lazily: 13 ms, not in the first batch
from torch.utils.data import Dataset
from torch.utils.data._utils import worker as torch_worker

from .rng.owned import GENERATOR_KINDS
from .rng.patches import install, of_thread

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator

__all__ = ["acting_as_worker", "own_copy", "rebound", "use_one_intra_op_thread"]

_logger = logging.getLogger("spdl_torch.data")


@contextmanager
def acting_as_worker(number: int, num_workers: int, base_seed: int, dataset: Any) -> Iterator[None]:
    """On this thread, and on no other, ``get_worker_info()`` describes worker ``number``."""
    install()
    of_thread.worker_info = _make_info(number, num_workers, base_seed, dataset)
    try:
        yield
    finally:
        of_thread.worker_info = None


def own_copy(dataset: Any, turn: threading.Lock) -> Any:
    """A worker's own view of the dataset: what a forked process would have, without the memory.

    The dataset object, and every dataset inside it, is copied shallowly: attributes that user
    code sets in a worker (a lazily opened file, a shard chosen in ``worker_init_fn``) stay in
    that worker, while lists of samples are shared. Transforms are copied deeply, because many
    keep state; one that cannot be copied is shared.

    The workers copy in ``turn``, one after another. Copying looks at ``__dict__``, and Python 3.11
    makes that dictionary at the first look; if the allocation starts the garbage collector, which
    may switch threads, a second one is made, both own the object's values, and the interpreter
    later crashes in a collection. Not one lock for all loaders: a copy may use a loader itself.
    """
    with turn:
        return _copy_dataset(dataset, {})


def rebound(function: Callable[..., Any], dataset: Any, own: Any) -> Callable[..., Any]:
    """A bound method of the dataset becomes the same method of the worker's copy."""
    if isinstance(function, types.MethodType) and function.__self__ is dataset:
        return types.MethodType(function.__func__, own)
    return function


def use_one_intra_op_thread() -> None:
    """On this thread: workers do not each start a team of them."""
    torch.set_num_threads(1)
    # torch applies its process-wide setting to a thread at the thread's first look at it: let
    # that happen now, before the trainer's setting is put back.
    torch.get_num_threads()


_TRANSFORM_NAMES = ("transform", "transforms", "target_transform")  # torchvision's convention


def _copy_dataset(dataset: Any, memo: dict[int, Any]) -> Any:
    if id(dataset) in memo:
        return memo[id(dataset)]
    if not isinstance(dataset, Dataset) and (
        not hasattr(dataset, "__dict__") or isinstance(dataset, list | dict | tuple | np.ndarray)
    ):
        return dataset  # a plain container: nothing that a worker would set, much to copy
    try:
        own = copy.copy(dataset)
    except Exception as error:
        _tell_shared(dataset, error)
        return dataset
    memo[id(dataset)] = own
    for name, value in vars(own).items() if hasattr(own, "__dict__") else ():
        if name in _TRANSFORM_NAMES or isinstance(value, GENERATOR_KINDS):
            own.__dict__[name] = _deep_copy_or_share(value, memo)
        elif isinstance(value, Dataset):
            own.__dict__[name] = _copy_dataset(value, memo)
        elif isinstance(value, list | tuple) and value and isinstance(value[0], Dataset):
            own.__dict__[name] = type(value)(_copy_dataset(v, memo) for v in value)
    return own


def _deep_copy_or_share(value: Any, memo: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(value, memo)
    except Exception as error:
        _tell_shared(value, error)
        return value


def _tell_shared(value: Any, error: Exception) -> None:
    """Processes would each have had one of their own."""
    _logger.warning(
        "DataLoader: %s cannot be copied (%s: %s), so all worker threads share it. If it keeps "
        "state, give it a __copy__ or __deepcopy__.",
        type(value).__name__,
        type(error).__name__,
        error,
    )


def _make_info(number: int, num_workers: int, base_seed: int, dataset: Any) -> Any:
    seed = base_seed + number
    details: dict[str, Any] = {
        "id": number,
        "num_workers": num_workers,
        "seed": seed,
        "dataset": dataset,
    }
    known = {field.name for field in fields(torch_worker.WorkerInfo)}
    if "worker_method" in known:  # torch 2.15 and later
        details["worker_method"] = "thread"
    if "rng" in known:
        details["rng"] = torch_worker._RNG(
            random.Random(seed),
            torch.Generator().manual_seed(seed),
            default_rng([number, seed]),
        )
    return torch_worker.WorkerInfo(**details)
