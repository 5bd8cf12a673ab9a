"""Decide where a loader's workers live: on threads of this process, or in processes of their own.

torch's workers own a copy of everything: the dataset, globals, the environment, the working
directory. Threads share all but the dataset object itself. So the workers are threads only where
that is known to be safe: the dataset's class is known, or the dataset says so itself, or the user
does (``isolation="thread"``). Everything else loads in processes with one worker each, started as
torch starts its workers, where whatever is right in torch is right by construction.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from ..observe.verdict.placement import Placement
from .rng.patches import install
from .vouching import Vouching, name_of, vouching_for

_CHECK = "assert_thread_safe checks it"
_PUTS = 'thread_safe = True in the dataset or isolation="thread" puts the workers there'


def placement_of(
    dataset: Any,
    num_workers: int,
    *,
    isolation: Literal["auto", "thread", "process"],
    collate_fn: Any,
    worker_init_fn: Any,
    asks_for_threads: bool = False,
) -> Placement:
    """Return where the workers of a loader with these arguments live.

    asks_for_threads: whether its multiprocessing_context starts threads.
    """
    if num_workers == 0:
        return _on_threads(0, "num_workers=0 loads in the calling thread")
    if isolation == "thread":
        found = vouching_for(dataset, collate_fn, worker_init_fn)
        return _on_threads(num_workers, f'isolation="thread" was given{_unless_safe(found)}')
    if isolation == "process":
        remedy = (
            f'If the dataset is safe on threads ({_CHECK}), isolation="thread" puts them there.'
        )
        reason = 'isolation="process" was given'
        return _in_processes(num_workers, reason, remedy)
    if asks_for_threads:
        return _on_threads(num_workers, "the multiprocessing_context starts threads")
    found = vouching_for(dataset, collate_fn, worker_init_fn)
    if found.refusing is not None:
        remedy = (
            f"Once it is safe on threads ({_CHECK}), thread_safe = True puts the workers there."
        )
        reason = f"{name_of(found.refusing)} says thread_safe = False"
        return _in_processes(num_workers, reason, remedy)
    if found.unknown:
        remedy = f"If it is ({_CHECK}), {_PUTS}."
        reason = f"{found.unknown} is not known to be safe on threads"
        return _in_processes(num_workers, reason, remedy)
    if not install():
        reason = f"torch {torch.__version__} cannot redirect the random draws of one thread"
        remedy = "On another release of torch they may be threads."
        return _in_processes(num_workers, reason, remedy)
    if found.declaring is not None:
        reason = f"{name_of(found.declaring)} says thread_safe = True"
    else:
        reason = f"{name_of(dataset)} is known to be safe on threads"
    return _on_threads(num_workers, reason)


def _unless_safe(found: Vouching) -> str:
    """Return what the log says where threads were asked for and nothing else vouches for them."""
    if found.refusing is not None:
        return f", though {name_of(found.refusing)} says thread_safe = False"
    return f", and nothing else vouches for {found.unknown}" if found.unknown else ""


def _on_threads(num_workers: int, reason: str) -> Placement:
    return Placement(num_workers=num_workers, num_processes=0, reason=reason)


def _in_processes(num_workers: int, reason: str, remedy: str) -> Placement:
    return Placement(
        num_workers=num_workers, num_processes=num_workers, reason=reason, remedy=remedy
    )
