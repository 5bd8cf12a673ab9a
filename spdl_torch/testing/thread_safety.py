"""A check that a dataset gives the same samples on threads of one process as in processes."""

from __future__ import annotations

import inspect
import itertools
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from time import sleep
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from ..checks import check_whole
from ..engine.failures import attach_note
from ..loader.dataloader import DataLoader
from ..loader.differences import differing_batch, path_of_difference
from ..objects.copies import deep_copy
from ..objects.members import Unfinished, reachable
from ..scopes import scope
from ..shown_text import shortened
from ._changes import changed_settings, checking, is_library, is_ours, put_back, settings_kept


def assert_thread_safe(
    dataset: Any,
    *,
    num_workers: int = 4,
    batch_size: int | None = 8,
    collate_fn: Callable[[Any], Any] | None = None,
    worker_init_fn: Callable[[int], None] | None = None,
    num_batches: int = 100,
    num_rounds: int = 3,
    timeout: float = 60,
    seed: int = 0,
) -> None:
    """Check that a dataset can be loaded on threads: with ``isolation="thread"``.

    The dataset is loaded in ``num_workers`` processes, and then on as many threads, which switch at
    almost every line of its code. The batches must be equal, bit by bit. A map-style dataset is
    read in a random order. Loading on threads must not change the process either: its working
    directory, its environment and its settings are the trainer's, too.

    Passing means that no fault was seen. How sure that is: the threads switch between the steps of
    the dataset's code, so what they share there is found in each round; within a library's call
    they switch as they happen to, and a race there may need more rounds. If the threads change a
    tensor or an array that they share, and no sample differs, a warning says so. A library that is
    not made for threads may end the process.

    It says what it does, on standard error.

    Args:
        dataset: map-style, with a length, or iterable. It is changed if loading on threads changes
            it.
        num_workers: number of processes, and of threads.
        batch_size: None = without batches.
        collate_fn: as the loader's; None = torch's.
        worker_init_fn: as the loader's.
        num_batches: the most in each round, so that an iterable dataset needs no end. All are kept
            in memory, and the dataset twice, except for arrays and tensors above 64 MiB.
        num_rounds: how often the dataset is loaded on threads.
        timeout: seconds to wait for a batch, which never comes if threads wait for each other.
        seed: of the order and the random streams.
    Raises: AssertionError: which batch and sample differs, which attributes the threads share, and
            what to do; or what loading changed in the process. The switch
            interval, the process's settings and its generators are restored.
        ValueError: a number < 1, or fewer than two workers. TypeError: no such dataset.
        Whatever a loader in processes raises: an error of the dataset's; that it does not answer,
        or cannot be pickled where processes are not forked.
    """
    check_whole("assert_thread_safe", num_workers=num_workers, least=2)
    check_whole("assert_thread_safe", num_batches=num_batches, num_rounds=num_rounds)
    if not isinstance(dataset, IterableDataset) and not hasattr(dataset, "__len__"):
        raise TypeError(
            "assert_thread_safe: dataset must have __getitem__ and __len__, or be an "
            f"IterableDataset, got {type(dataset).__name__}. Pass the dataset itself."
        )
    order = None  # of the samples of a map-style dataset: random, and always the same
    if not isinstance(dataset, IterableDataset):
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(dataset), generator=generator).tolist()
        del order[num_batches * (batch_size or 1) :]
    make_loader = partial(
        DataLoader,
        dataset,
        batch_size,
        sampler=order,
        num_workers=num_workers,
        collate_fn=collate_fn,
        timeout=timeout,
        worker_init_fn=worker_init_fn,
        seed=seed,
    )
    with checking(), settings_kept() as process:
        _compare(make_loader, num_batches, num_rounds, process)


def _compare(
    make_loader: Callable[..., DataLoader[Any]],
    num_batches: int,
    num_rounds: int,
    process: dict[str, Any],
) -> None:
    print("in processes", file=sys.stderr, flush=True)
    expected = _in_processes(make_loader(isolation="process"), num_batches)
    loader = make_loader(isolation="thread")
    before = _copies(loader)
    changed_here: dict[str, str] = {}
    rounds: list[tuple[list[Any], Exception | None]] = []
    for number in range(num_rounds):
        print(f"on threads, round {number + 1}/{num_rounds}", file=sys.stderr, flush=True)
        rounds.append(_on_threads(make_loader(isolation="thread"), num_batches))
        changed_here = {**changed_settings(process), **changed_here}
        put_back(process)  # each round begins alike
    settings = _listed(list(changed_here.values()), "; ")
    changed = _changed(before, _shared(loader))
    for number, (got, error) in enumerate(rounds):
        difference = _difference(expected, got, error)
        if difference is not None:
            raise AssertionError(
                f"assert_thread_safe: {loader.num_workers} threads must give the samples that "
                f"processes give, but in round {number} {difference}. {_reason(changed, settings)}"
            ) from error
    if settings:
        raise AssertionError(
            "assert_thread_safe: loading on threads must leave the process as it is, but it "
            f"changed {settings}. All threads share that, the training loop's too. "
            f"Set it in the training program, {_OR_PROCESSES}."
        )
    # Of a tensor or an array that differs in its contents there is nothing to say but the place.
    if written := [place for place, what in changed if not what]:
        warnings.warn(
            f"assert_thread_safe: no sample differed, but the threads share {_listed(written)}, "
            "which loading changed. That is safe only if each sample writes places of its own "
            "there; what a library writes may be seen too rarely to be found here.",
            stacklevel=3,
        )


def _in_processes(loader: DataLoader[Any], num_batches: int) -> list[Any]:
    try:
        return list(islice(loader, num_batches))
    except Exception as error:
        attach_note(error, "in worker processes, with which assert_thread_safe compares threads")
        raise


_MOST_OBJECTS = 5_000
_MOST_MEMBERS = 1_000
_MOST_BYTES = 1 << 26


def _shared(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return what threads share, by its expression: the dataset's attributes one by one."""
    dataset = loader.dataset
    attributes = {
        f"dataset.{name}": each for name, each in getattr(dataset, "__dict__", {}).items()
    }
    return {**(attributes or {"dataset": dataset}), "collate_fn": loader.collate_fn}


def _copies(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return deep copies of what threads share. A file, a generator, a lock has none."""
    shared = _shared(loader)
    memo: dict[int, Any] = {}  # large arrays are as they were copied
    with suppress(Unfinished):
        for each in reachable(shared.values(), _MOST_OBJECTS, _MOST_MEMBERS):
            if isinstance(each, torch.Tensor | np.ndarray) and each.nbytes > _MOST_BYTES:
                memo[id(each)] = each
    copies = {}
    for name, each in shared.items():
        with suppress(Exception):
            own = deep_copy(each, memo)
            if path_of_difference(own, each) is None:  # else a change could not be told
                copies[name] = own
    return copies


def _changed(before: dict[str, Any], now: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the first place in each part that differs from before, and what is there."""
    found = []
    for name, own in before.items():
        with suppress(Exception):  # what can be compared no more
            difference = path_of_difference(own, now[name])
            if difference is not None:
                place, _, what = difference.removeprefix(" at ").partition(": ")
                found.append((f"{name}{place}", shortened(what, 80)))
    return found


def _difference(expected: list[Any], got: list[Any], error: Exception | None) -> str | None:
    """Return where the batches first differ, or how they ended; None: they are equal."""
    if (found := differing_batch(expected, got)) is not None:
        return found
    if error is not None:
        text = f"{type(error).__name__}: {error}".partition("\n")[0].rstrip(".")
        return f"batch {len(got)} raised {text[:200]}"
    if len(got) != len(expected):
        return f"there are {len(got)} batches in place of {len(expected)}"
    return None


_OR_PROCESSES = "or leave isolation out: then it is loaded in worker processes"
_MOST_NAMES = 4


def _reason(changed: list[tuple[str, str]], settings: str) -> str:
    """Return the likely reason of a difference, and what to do; ``settings``: of the process."""
    also = f"Loading also changed {settings}. " if settings else ""
    if changed:
        names = [f"{place} ({what})" if what else place for place, what in changed]
        shared = f"The threads share {_listed(names)}, which loading changed."
    else:
        shared = (
            "No attribute that has a copy was seen to change. Look for what else threads share "
            "(open files and other handles, variables around functions, globals, attributes of "
            "classes, os.getpid(), state in a library), and for generators without a seed."
        )
    return (
        f"{shared} {also}Make or copy it for each sample, keep one for each thread "
        "(threading.local()), or make it when it is first used, on self: each worker has its own "
        f"self; {_OR_PROCESSES}."
    )


def _listed(names: list[str], separator: str = ", ") -> str:
    more = [f"{len(names) - _MOST_NAMES} more"] if len(names) > _MOST_NAMES else []
    return separator.join([*names[:_MOST_NAMES], *more])


_SWITCH_SECONDS = 1e-6
# Python 3.11 crashes when threads share a generator that is traced, and pauses elsewhere show that.
_GENERATORS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_GOLDEN = 0x9E3779B1  # Knuth's multiplier: its multiples by 0, 1, 2, ... look random
_PAUSED = 64  # of 256 steps; also the longest pause, in microseconds
_MOST_PAUSES = 4_000
"""The pauses of one block: a fraction of a second, even for a dataset that loops over pixels in
Python."""


@scope
def threads_interleaved() -> Iterator[None]:
    """Make threads that start in the block switch often; afterwards restore how it was.

    A short switch interval alone shows few races: a thread keeps the GIL while it runs short lines.
    So a quarter of the steps of user code, and of Python's modules that it calls, release the GIL,
    by the tracing hook that debuggers use. A step is a bytecode: a buffer may be written and read
    in one line.
    """
    interval, tracer = sys.getswitchinterval(), threading.gettrace()
    sys.setswitchinterval(_SWITCH_SECONDS)
    threading.settrace(_pausing())
    try:
        yield
    finally:
        threading.settrace(tracer)
        sys.setswitchinterval(interval)


def _pausing() -> Callable[[FrameType, str, Any], Any]:
    steps, pauses = itertools.count(), itertools.count()
    is_over = False

    def on_step(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal is_over
        if is_over:
            return None
        # In lockstep, four threads that shuffle a list alike would undo one another's swaps.
        irregular = next(steps) * _GOLDEN >> 16 & 0xFF
        if irregular < _PAUSED:
            is_over = next(pauses) >= _MOST_PAUSES
            sleep(_SWITCH_SECONDS * irregular)
        return on_step

    def on_call(frame: FrameType, event: str, argument: Any) -> Any:
        if is_over or frame.f_code.co_flags & _GENERATORS:
            return None
        module, caller = str(frame.f_globals.get("__name__")), frame.f_back
        # Python's own modules where user code calls them: tarfile is one of them, the loader not.
        is_called = caller is not None and caller.f_trace is on_step
        if is_library(module) and (not is_called or is_ours(module)):
            return None
        frame.f_trace_opcodes = True
        return on_step

    return on_call


_JOIN_SECONDS = 10.0


def _on_threads(loader: DataLoader[Any], most: int) -> tuple[list[Any], Exception | None]:
    """Return the batches up to the first error, and that error."""
    batches: list[Any] = []
    error: Exception | None = None
    others = set(threading.enumerate())
    with threads_interleaved():
        iterator = iter(loader)
        try:
            batches.extend(islice(iterator, most))
        except Exception as raised:
            error = raised
        del iterator  # its threads finish their samples, and end
    for thread in set(threading.enumerate()) - others:
        # What is examined next must no longer change. A thread that hangs is left alone.
        if thread.name.startswith("spdl-"):
            thread.join(_JOIN_SECONDS)
    return batches, error
