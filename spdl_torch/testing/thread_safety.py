"""A check that a dataset gives the same samples on threads of one process as alone."""

from __future__ import annotations

import inspect
import itertools
import multiprocessing
import multiprocessing.process
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from time import sleep
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch.utils.data import IterableDataset

from ..checks import check_whole
from ..loader.backends.dataset_copies import own_copy
from ..loader.backends.worker_thread import acting_as_worker
from ..loader.dataloader import DataLoader
from ..loader.differences import differing_batch
from ..loader.fetching.batch_maker import BatchMaker, BatchRecipe
from ..loader.fetching.items import EndOfIterable
from ..loader.rng.keys import StreamKey, epoch_seed
from ..loader.rng.owned import OwnedGenerators
from ..loader.rng.streams import SampleStreams
from ..locks import RLock
from ..objects.copies import deep_copy
from ..progress_bar import ProgressBar
from ..scopes import scope
from ._changes import (
    SharedObjects,
    changed_settings,
    checking,
    is_large,
    is_library,
    is_ours,
    put_back,
    reached,
    settings_kept,
)


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

    The dataset is loaded on ``num_workers`` threads, which switch at almost every line of its
    code, and then alone, on this thread. The batches must be equal, bit by bit. A map-style
    dataset is read in a random order; of an iterable dataset, each worker's share is read alone,
    one after the other. Loading must not change the process either: its working directory, its
    environment and its settings are the trainer's, too.

    Passing means that no fault was seen. How sure that is: the threads switch between the steps of
    the dataset's code, so what they share there is found in each round; within a library's call
    they switch as they happen to, and a race there may need more rounds. If the threads change a
    tensor or an array that they share, and no sample differs, a warning says so. A library that is
    not made for threads may end the process.

    It says what it does, on standard error; on a terminal a bar shows how far it is.

    Args:
        dataset: map-style, with a length, or iterable. It is changed if loading it changes it.
        num_workers: number of threads.
        batch_size: None = without batches.
        collate_fn: as the loader's; None = torch's.
        worker_init_fn: as the loader's.
        num_batches: the most in each round, and in each worker's share when it is read alone, so
            that an iterable dataset needs no end. All are kept in memory, and the dataset twice,
            except for arrays and tensors above 64 MiB.
        num_rounds: how often the dataset is loaded on threads.
        timeout: seconds to wait for a batch, which never comes if threads wait for each other.
        seed: of the order and the random streams.
    Raises: AssertionError: which batch and sample differs, which attributes the threads share, and
            what to do; or what loading changed in the process. The switch
            interval, the process's settings and its generators are restored.
        ValueError: a number < 1, or fewer than two workers. TypeError: no such dataset.
        Whatever the dataset raises when it is loaded alone.
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
        isolation="thread",
        seed=seed,
    )
    with checking(), settings_kept() as process:
        both_ways = _BothWays(make_loader, make_loader(), num_batches, seed)
        _compare(both_ways, num_rounds, process)


def _compare(both_ways: _BothWays, num_rounds: int, process: dict[str, Any]) -> None:
    """Load on threads first: what a run alone leaves in the dataset might mask their races."""
    loader = both_ways.loader
    copies = _private_copy(loader.dataset, loader.collate_fn)
    shared = SharedObjects(loader.dataset, (loader.collate_fn, loader.worker_init_fn))
    changes: dict[str, str] = {}
    rounds: list[tuple[list[Any], Exception | None]] = []
    most_batches = both_ways.num_batches if both_ways.is_iterable else len(loader)
    with ProgressBar("batches") as bar:
        for number in range(num_rounds):
            bar.begin(f"on threads, round {number + 1}/{num_rounds}", most_batches)
            rounds.append(both_ways.on_threads(bar.advance))
            shared.look()
            changes = {**changed_settings(process), **changes}
            put_back(process)  # each round begins alike
        bar.begin("alone")
        expected = both_ways.alone(*copies)
    changed = _listed(list(changes.values()), "; ")
    for number, (got, error) in enumerate(rounds):
        difference = _difference(expected, got, error)
        if difference is not None:
            raise AssertionError(
                f"assert_thread_safe: {loader.num_workers} threads must give the samples that "
                f"one gives alone, but in round {number} {difference}. {_reason(shared, changed)}"
            ) from error
    if changes:
        raise AssertionError(
            "assert_thread_safe: loading on threads must leave the process as it is, but it "
            f"changed {changed}. All threads share that, the trainer's too. "
            f"Set it in the training program, {_OR_PROCESSES}."
        )
    if written := shared.written():
        warnings.warn(
            f"assert_thread_safe: no sample differed, but the threads share {_listed(written)}, "
            "which loading changed. That is safe only if each sample writes places of its own "
            "there; what a library writes may be seen too rarely to be found here.",
            stacklevel=3,
        )


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


def _reason(shared: SharedObjects, changes: str) -> str:
    """Return the likely reason of a difference, and what to do; ``changes``: of the process."""
    also = f"Loading also changed {changes}. " if changes else ""
    if shared.changed:
        return (
            f"The threads share {_listed([*shared.changed])}, which loading changed. {also}Make or "
            "copy it for each sample, keep one for each thread (threading.local()), or make it "
            f"when it is first used, on self: each worker has its own self; {_OR_PROCESSES}."
        )
    if suspects := shared.suspects():
        return (
            f"The threads share {_listed(suspects)}. {also}Make it when it is first used, on self: "
            f"each worker has its own self; {_OR_PROCESSES}."
        )
    return (
        f"{also}Nothing that the dataset holds was seen to change. Look for what all threads of a "
        "process share (globals, attributes of classes, os.getpid(), state in a library), and for "
        f"generators without a seed, which assert_reproducible finds; {_OR_PROCESSES}."
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


_MOST_MEMBERS = 1_000


def _private_copy(
    dataset: Any, collate_fn: Callable[[Any], Any]
) -> tuple[Any, Callable[[Any], Any]]:
    """Copy both deeply, as a process would have them; a method of the dataset becomes its copy's.

    What cannot be copied is shared: an open file, a generator, a lock.
    """
    held = reached([("dataset", dataset)], _MOST_MEMBERS)
    memo = {id(value): value for _, value in held if is_large(value)}  # which a copy may share
    own = _deep_copy(dataset, memo)
    if own is dataset:
        own = _copy_by_attributes(dataset, memo)
    return own, _deep_copy(collate_fn, memo)  # which knows the dataset's copy


def _deep_copy(value: Any, memo: dict[int, Any]) -> Any:
    """Return a deep copy, or the value itself if there is none."""
    try:
        return deep_copy(value, memo)
    except Exception:  # a handle, a generator, a lock, or a class that refuses
        return value


def _copy_by_attributes(dataset: Any, memo: dict[int, Any]) -> Any:
    """Copy what can be copied of a dataset whose copy as a whole fails."""
    own = own_copy(dataset, RLock())
    if own is dataset or not hasattr(own, "__dict__"):
        return own
    memo[id(dataset)] = own
    for name, value in tuple(vars(own).items()):
        vars(own)[name] = _deep_copy(value, memo)
    return own


_JOIN_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class _BothWays:
    """The ways to load a dataset."""

    make_loader: Callable[[], DataLoader[Any]]
    loader: DataLoader[Any]
    """One that nobody iterates over."""
    num_batches: int
    seed: int

    @property
    def is_iterable(self) -> bool:
        """Whether the dataset gives its samples itself."""
        return isinstance(self.loader.dataset, IterableDataset)

    def on_threads(self, done: Callable[[int], None]) -> tuple[list[Any], Exception | None]:
        """Return the batches up to the first error, and that error; tell how many are done."""
        batches: list[Any] = []
        error: Exception | None = None
        others = set(threading.enumerate())
        with threads_interleaved():
            iterator = iter(self.make_loader())
            try:
                for batch in islice(iterator, self.num_batches):
                    batches.append(batch)
                    done(len(batches))
            except Exception as raised:
                error = raised
            del iterator  # its threads finish their samples, and end
        for thread in set(threading.enumerate()) - others:
            # What is examined next must no longer change. A thread that hangs is left alone.
            if thread.name.startswith("spdl-"):
                thread.join(_JOIN_SECONDS)
        return batches, error

    def alone(self, dataset: Any, collate_fn: Any) -> list[Any]:
        """Return the same batches, made on this thread from copies of dataset and collate_fn; those
        of an iterable are loaded worker by worker, then interleaved as a loader's are.
        """
        torch.set_num_threads(1)  # as in a worker: sums may differ in their bits
        if not self.is_iterable:
            return self._share(0, dataset, collate_fn)
        numbers = range(self.loader.num_workers)
        shares = [self._share(each, *_private_copy(dataset, collate_fn)) for each in numbers]
        turns = range(max(map(len, shares)))
        in_turn = [share[turn] for turn in turns for share in shares if turn < len(share)]
        return in_turn[: self.num_batches]

    def _share(self, number: int, dataset: Any, collate_fn: Any) -> list[Any]:
        """Return the batches of worker ``number``, with the random numbers that it draws."""
        loader, seed = self.loader, epoch_seed(self.seed, 0)
        streams = SampleStreams(seed, number)
        streams.seed_owned(OwnedGenerators(dataset, collate_fn))
        key = StreamKey(seed, is_seeded=True)
        if self.is_iterable:
            key = key._replace(num_replicas=loader.num_workers, rank=number)
        batches: list[Any] = []
        info = acting_as_worker(number, loader.num_workers, seed, dataset)
        with info, _in_process_of(number), streams:
            if loader.worker_init_fn is not None:
                loader.worker_init_fn(number)
            makes_batches = loader.batch_size is not None
            recipe = BatchRecipe(dataset, collate_fn, makes_batches, drop_last=False)
            maker = BatchMaker(recipe, streams=streams, key=key, worker=number)
            for which, index in enumerate(islice(loader._index_sampler, self.num_batches)):
                try:
                    batch, _ = maker.make(which * (loader.batch_size or 1), index, which)
                except EndOfIterable:
                    break
                batches.append(batch)
        return batches


def _in_process_of(number: int) -> AbstractContextManager[Any]:
    """Let ``multiprocessing.current_process()`` be that of worker ``number``: a dataset may divide
    itself by its name or number.
    """
    process: Any = multiprocessing.Process(name=f"Process-{number + 1}")
    process._identity = (number + 1,)
    # It has no public way to set this.
    return patch.object(multiprocessing.process, "_current_process", process)
