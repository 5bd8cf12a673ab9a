"""Let a thread look like one of torch's worker processes to the user's code."""

from __future__ import annotations

import random
import types
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
from numpy.random import default_rng  # numpy loads it lazily: 13 ms, not in the first batch
from torch.utils.data._utils import worker as torch_worker

from ..rng.patches import install, of_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["acting_as_worker", "rebound", "use_one_intra_op_thread"]


@contextmanager
def acting_as_worker(
    number: int, num_workers: int, base_seed: int, dataset: Any, *, is_process: bool = False
) -> Iterator[None]:
    """Let ``get_worker_info()`` describe worker ``number``, on this thread alone.

    ``is_process``: the worker has the process to itself, so threads that the dataset starts get the
    same answer, as in torch's workers.
    """
    install()
    method = "multiprocessing" if is_process else "thread"
    info = _make_info(number, num_workers, base_seed, dataset, method)
    of_thread.worker_info = info
    if is_process:
        torch_worker._worker_info = info
    try:
        yield
    finally:
        of_thread.worker_info = None


def rebound(function: Callable[..., Any], dataset: Any, own: Any) -> Callable[..., Any]:
    """Bind a method of ``dataset`` to the worker's copy ``own``; return others unchanged."""
    if isinstance(function, types.MethodType) and function.__self__ is dataset:
        return types.MethodType(function.__func__, own)
    return function


def use_one_intra_op_thread() -> None:
    """Limit this thread to one intra-op thread, so that workers do not each start a team."""
    torch.set_num_threads(1)
    # torch copies its process-wide setting to a thread when the thread first reads it: read it
    # now, before _start_threads restores the trainer's setting.
    torch.get_num_threads()


def _make_info(number: int, num_workers: int, base_seed: int, dataset: Any, method: str) -> Any:
    seed = base_seed + number
    details: dict[str, Any] = {
        "id": number,
        "num_workers": num_workers,
        "seed": seed,
        "dataset": dataset,
    }
    known = {field.name for field in fields(torch_worker.WorkerInfo)}
    if "worker_method" in known:  # torch 2.15 and later
        details["worker_method"] = method
    if "rng" in known:
        details["rng"] = torch_worker._RNG(
            random.Random(seed),
            torch.Generator().manual_seed(seed),
            default_rng([number, seed]),
        )
    return torch_worker.WorkerInfo(**details)
