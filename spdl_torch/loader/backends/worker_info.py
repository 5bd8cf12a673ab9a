"""Let a thread look like one of torch's worker processes to the user's code."""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data._utils import worker as torch_worker

from ...scopes import scope
from ..rng.patches import install_functions, of_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@scope
def acting_as_worker(
    number: int, num_workers: int, base_seed: int, dataset: Any, *, is_process: bool = False
) -> Iterator[None]:
    """Let ``get_worker_info()`` describe worker ``number``, on this thread alone.

    ``is_process``: the worker has the process to itself, so threads that the dataset starts get the
    same answer, as in torch's workers.

    The field ``rng`` stays empty, as in torch's workers, which are processes. A generator in it
    would be that of a worker: ``torch.thread_safe_generator()`` returns it on threads and None
    elsewhere, so draws would depend on which thread makes a sample. None are the thread's streams.
    """
    install_functions()
    info = torch_worker.WorkerInfo(
        id=number,
        num_workers=num_workers,
        seed=base_seed + number,
        dataset=dataset,
        worker_method="multiprocessing" if is_process else "thread",
    )
    of_thread.worker_info = info
    if is_process:
        torch_worker._worker_info = info
    try:
        yield
    finally:
        of_thread.worker_info = None
        if is_process:
            torch_worker._worker_info = None  # it would keep the dataset


def rebound(function: Callable[..., Any], dataset: Any, own: Any) -> Callable[..., Any]:
    """Bind a method of ``dataset`` to the worker's copy ``own``; return others unchanged."""
    if isinstance(function, types.MethodType) and function.__self__ is dataset:
        return types.MethodType(function.__func__, own)
    return function


def use_one_intra_op_thread() -> None:
    """Limit this thread to one intra-op thread, so that workers do not each start a team."""
    torch.set_num_threads(1)
    # torch copies its process-wide setting to a thread when the thread first reads it: read it
    # now, before intra_op_threads_kept() restores the trainer's setting.
    torch.get_num_threads()


@scope
def intra_op_threads_kept() -> Iterator[None]:
    """Keep this thread's setting while the block has others use one intra-op thread: that changes
    the default of later threads, too, and this one's own if it was never read.
    """
    num_threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
