"""A dataset loaded on threads that interfere with each other, and alone."""

from __future__ import annotations

import inspect
import itertools
import multiprocessing
import multiprocessing.process
import sys
import threading
from dataclasses import dataclass
from itertools import islice, repeat
from time import sleep
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch.utils.data import IterableDataset

from ..loader.backends.dataset_copies import own_copy, rebound
from ..loader.backends.worker_thread import acting_as_worker
from ..loader.dataloader import DataLoader
from ..loader.fetching.batch_maker import BatchMaker, BatchRecipe
from ..loader.fetching.items import EndOfIterable
from ..loader.rng.keys import StreamKey, epoch_seed
from ..loader.rng.owned import OwnedGenerators
from ..loader.rng.streams import SampleStreams
from ..locks import RLock
from ..objects.copies import deep_copy
from ..scopes import scope
from ._members import is_library, is_ours, reached

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType


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


_LARGE_BYTES = 1 << 26
_MOST_MEMBERS = 1_000


def private_copy(
    dataset: Any, collate_fn: Callable[[Any], Any] | None
) -> tuple[Any, Callable[[Any], Any] | None]:
    """Copy both deeply, as a process would have them; a method of the dataset becomes its copy's.

    What cannot be copied is shared: an open file, a generator, a lock.
    """
    memo = _large_in(dataset)
    own = _deep_copy(dataset, memo)
    if own is dataset:
        own = _copy_by_attributes(dataset, memo)
    if collate_fn is None:
        return own, None
    bound = rebound(collate_fn, dataset, own)
    return own, _deep_copy(collate_fn, memo) if bound is collate_fn else bound


def _deep_copy(value: Any, memo: dict[int, Any]) -> Any:
    """Return a deep copy, or the value itself if there is none."""
    try:
        return deep_copy(value, memo)
    except Exception:  # a handle, a generator, a lock, or a class that refuses
        return value


def _copy_by_attributes(dataset: Any, memo: dict[int, Any]) -> Any:
    """Copy what can be copied of a dataset whose copy as a whole fails."""
    memo.clear()  # the attempt may have left partial copies
    memo.update(_large_in(dataset))
    own = own_copy(dataset, RLock())
    if own is dataset or not hasattr(own, "__dict__"):
        return own
    memo[id(dataset)] = own
    for name, value in tuple(vars(own).items()):
        vars(own)[name] = _deep_copy(value, memo)
    return own


def _large_in(dataset: Any) -> dict[int, Any]:
    """Return the large arrays that a dataset leads to, by id: what a copy may share."""
    return {
        id(value): value
        for _, value in reached([("dataset", dataset)], _MOST_MEMBERS)
        if isinstance(value, torch.Tensor | np.ndarray) and value.nbytes > _LARGE_BYTES
    }


_JOIN_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class BothWays:
    """A dataset and the ways to load it: the arguments of ``assert_thread_safe``."""

    dataset: Any
    num_workers: int
    batch_size: int | None
    collate_fn: Callable[[Any], Any] | None
    worker_init_fn: Callable[[int], None] | None
    num_batches: int
    timeout: float
    seed: int

    def on_threads(self, done: Callable[[int], None]) -> tuple[list[Any], Exception | None]:
        """Return the batches up to the first error, and that error; tell how many are done."""
        batches: list[Any] = []
        error: Exception | None = None
        others = set(threading.enumerate())
        with threads_interleaved():
            iterator = iter(self._loader())
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
        if not self._is_iterable:
            return self._share(0, dataset, collate_fn)
        numbers = range(self.num_workers)
        shares = [self._share(each, *private_copy(dataset, collate_fn)) for each in numbers]
        turns = range(max(map(len, shares)))
        in_turn = [share[turn] for turn in turns for share in shares if turn < len(share)]
        return in_turn[: self.num_batches]

    @property
    def _is_iterable(self) -> bool:
        return isinstance(self.dataset, IterableDataset)

    def _loader(self) -> DataLoader[Any]:
        return DataLoader(
            self.dataset,
            self.batch_size,
            sampler=None if self._is_iterable else self._order(),
            num_workers=self.num_workers,
            collate_fn=self.collate_fn,
            timeout=self.timeout,
            worker_init_fn=self.worker_init_fn,
            isolation="thread",
            seed=self.seed,
        )

    def _order(self) -> list[int]:
        """Return the indices of a map-style dataset's samples, in a random order that is fixed."""
        generator = torch.Generator().manual_seed(self.seed)
        order: list[int] = torch.randperm(len(self.dataset), generator=generator).tolist()
        return order[: self.num_batches * (self.batch_size or 1)]

    def _indices(self) -> Iterator[Any]:
        """Yield the index of each batch, as a sampler does."""
        size = self.batch_size
        if self._is_iterable:
            yield from repeat(None if size is None else [None] * size)
        elif size is None:
            yield from self._order()
        else:
            order = self._order()
            for first in range(0, len(order), size):
                yield order[first : first + size]

    def most_batches(self) -> int:
        """Return how many batches a round has at most."""
        if self._is_iterable:
            return self.num_batches
        return min(self.num_batches, -(-len(self.dataset) // (self.batch_size or 1)))

    def _share(self, number: int, dataset: Any, collate_fn: Any) -> list[Any]:
        """Return the batches of worker ``number``, with the random numbers that it draws."""
        seed = epoch_seed(self.seed, 0)
        collate_fn = collate_fn or self._loader().collate_fn
        streams = SampleStreams(seed, number)
        streams.seed_owned(OwnedGenerators(dataset, collate_fn))
        key = StreamKey(seed, is_seeded=True)
        if self._is_iterable:
            key = key._replace(num_replicas=self.num_workers, rank=number)
        batches: list[Any] = []
        info = acting_as_worker(number, self.num_workers, seed, dataset)
        with info, _in_process_of(number), streams:
            if self.worker_init_fn is not None:
                self.worker_init_fn(number)
            maker = BatchMaker(
                BatchRecipe(dataset, collate_fn, self.batch_size is not None, drop_last=False),
                streams=streams,
                key=key,
                worker=number,
                fetch_cell=None,
                collate_cell=None,
            )
            for which, index in enumerate(islice(self._indices(), self.num_batches)):
                try:
                    batch, _ = maker.make(which * (self.batch_size or 1), index, which)
                except EndOfIterable:
                    break
                batches.append(batch)
        return batches


@scope
def _in_process_of(number: int) -> Iterator[None]:
    """Let ``multiprocessing.current_process()`` be that of worker ``number``: a dataset may divide
    itself by its name or number.
    """
    module: Any = multiprocessing.process  # it has no public way to set this
    process = multiprocessing.Process(name=f"Process-{number + 1}")
    cast("Any", process)._identity = (number + 1,)
    current, module._current_process = module._current_process, process
    try:
        yield
    finally:
        module._current_process = current
