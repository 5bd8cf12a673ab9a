"""What makes a thread look like one of torch's worker processes to the user's code.

torch keeps ``get_worker_info()``'s answer in a module global, one for the whole process. Users
import the function early (``from torch.utils.data import get_worker_info``), so replacing the
name would miss them; its code is replaced instead, once, when the first worker thread starts.
"""

from __future__ import annotations

import random
import sys
import threading
import types
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
from numpy.random import default_rng  # numpy loads it lazily: 13 ms, not in the first batch
from torch.utils.data._utils import worker as torch_worker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["acting_as_worker", "rebound", "use_one_intra_op_thread"]

_install_lock = threading.Lock()
_of_thread = threading.local()


@contextmanager
def acting_as_worker(number: int, num_workers: int, base_seed: int, dataset: Any) -> Iterator[None]:
    """On this thread, and on no other, ``get_worker_info()`` describes worker ``number``."""
    _install()
    _of_thread.info = _make_info(number, num_workers, base_seed, dataset)
    try:
        yield
    finally:
        del _of_thread.info


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


def _get_worker_info() -> Any:
    # Runs as torch's own function, so globals() is torch's module; _install() put two names there.
    module = globals()
    info = getattr(module["_spdl_torch_of_thread"], "info", None)
    if info is None:
        return module["_worker_info"]
    # torch's collate would put every batch into shared memory when it finds itself in a worker;
    # a thread needs none.
    caller = module["_spdl_torch_sys"]._getframe(1).f_globals.get("__name__")
    return None if caller == "torch.utils.data._utils.collate" else info


def _install() -> None:
    with _install_lock:
        if not hasattr(torch_worker, "_spdl_torch_of_thread"):
            torch_worker._spdl_torch_of_thread = _of_thread  # type: ignore[attr-defined]
            torch_worker._spdl_torch_sys = sys  # type: ignore[attr-defined]
            torch_worker.get_worker_info.__code__ = _get_worker_info.__code__
