"""Pinned memory is locked once for a loader, not in each epoch, and goes when it is wanted."""

from __future__ import annotations

import copy
import gc
import mmap
import os
import pickle
import sys
import threading
import time
from contextlib import closing, contextmanager
from functools import partial
from itertools import islice

import numpy as np
import pytest
import torch
from _gates import Boom, until
from _inside import state_of
from _lazy_device import LazyDevice, install, put_to_rest
from _loader_helpers import assert_threads_end
from torch.utils.data import Dataset

from spdl_torch import DataLoader, PipelineDataset
from spdl_torch.io import batch_storage
from spdl_torch.io._transfer import cuda, kept
from spdl_torch.io._transfer.kept import TransferKeeper
from spdl_torch.io._transfer.region import keepers, mapped, mapped_file
from spdl_torch.io._transfer.slabs import SMALL_BYTES
from spdl_torch.machine.limits import Limits
from spdl_torch.pipeline import PipelineBuilder, StatsQueue

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

COUNT = 12


class Filled(Dataset):
    """Samples of one value each."""

    thread_safe = True

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        # Two are the smallest batch that is made in pinned memory, and the smallest slab.
        return torch.full((SMALL_BYTES // 2,), index, dtype=torch.uint8)


def in_storage(index):
    """An op that makes its item in memory that can be copied from."""
    return batch_storage().tensor((SMALL_BYTES,)).fill_(index)


class CountingDevice(LazyDevice):
    """Counts the locks, and refuses what would be more than so many bytes."""

    num_locks = num_unlocks = 0
    most_bytes = 1 << 40

    def cudaHostRegister(self, address, num_bytes, flags):
        self.num_locks += 1
        self.is_refusing = sum(self.locked.copy().values()) + num_bytes > self.most_bytes
        return super().cudaHostRegister(address, num_bytes, flags)

    def cudaHostUnregister(self, address):
        self.num_unlocks += 1
        super().cudaHostUnregister(address)


@pytest.fixture
def device(monkeypatch):
    """In place of CUDA; others' loaders keep nothing there."""
    keepers.clear()
    install(device := CountingDevice(is_prompt=True), monkeypatch.setattr)
    yield device
    put_to_rest()
    gc.collect()
    assert device.violations == []


def in_threads(**options):
    return DataLoader(Filled(), 2, device="cuda", num_workers=2, isolation="thread", **options)


def in_processes(**options):
    return DataLoader(Filled(), 2, device="cuda", num_workers=2, isolation="process", **options)


def without_workers(**options):
    return DataLoader(Filled(), 2, device="cuda", num_workers=0, **options)


def of_pipeline():
    stages = PipelineBuilder().add_source(range(COUNT)).pipe(in_storage).add_sink(1)
    return PipelineDataset(stages, device="cuda")


IN_THIS_PROCESS = [without_workers, in_threads, of_pipeline]
SEATS = pytest.mark.parametrize("make", [*IN_THIS_PROCESS, in_processes])


def run_epoch(batches):
    """Its batches are right, and nothing of it is left."""
    found = []
    for batch in batches:
        assert (batch == batch[..., :1]).all()
        found += batch[..., 0].flatten().tolist()
    assert found == list(range(len(found)))
    del batch
    assert_threads_end()


def epochs_of(device, loader, epochs):
    """How often memory was locked, and how much of that more than once."""
    before = device.num_locks - len(device.locked)
    for batches in epochs:
        run_epoch(batches(loader))
    return device.num_locks, device.num_locks - len(device.locked) - before


def test_memory_comes_back_from_a_pipeline_that_could_not_be_made(device):
    """The next pass has it."""
    refuses = []

    class Queue(StatsQueue):
        def __init__(self, *args, **options):
            if refuses:
                raise Boom
            super().__init__(*args, **options)

    stages = PipelineBuilder().add_source(range(COUNT)).pipe(in_storage).add_sink(1)
    dataset = PipelineDataset(stages, device="cuda", queue_class=Queue)
    run_epoch(dataset)
    num_locks = device.num_locks
    refuses.append(True)
    with pytest.raises(Boom):
        next(iter(dataset))
    refuses.clear()
    run_epoch(dataset)
    assert device.num_locks == num_locks


WHOLE = [iter] * 3
LEFT_EARLY = [iter, lambda loader: islice(loader, 2), lambda loader: islice(loader, 2), iter]


@pytest.mark.parametrize("make", IN_THIS_PROCESS)
def test_memory_is_locked_once(device, make):
    """That of the transfer, and that in which batches are made."""
    num_locks, num_again = epochs_of(device, make(), WHOLE)
    assert num_locks >= 3
    assert num_again == 0


@pytest.mark.parametrize("make", IN_THIS_PROCESS)
def test_memory_is_locked_once_however_epochs_end(device, make):
    """In forked processes what a fork may still see is not written again."""
    num_locks, num_again = epochs_of(device, make(), LEFT_EARLY)
    assert num_locks >= 3
    assert num_again == 0


@SEATS
def test_memory_goes_with_the_loader(device, make):
    """Nothing is locked any more, and nobody is asked for it."""
    run_epoch(loader := make())
    assert device.locked
    del loader
    gc.collect()
    assert device.locked == {}
    assert not keepers.now()


def test_two_epochs_at_once_have_memory_of_their_own(device):
    """And one of them is kept: the loader does not gather more with each epoch."""
    loader, found = in_threads(), []
    for _ in range(3):
        assert all(torch.equal(one, two) for one, two in zip(loader, loader, strict=True))
        assert_threads_end()
        found.append(len(device.locked))
    run_epoch(loader)
    (keeper,) = keepers.now()
    assert keeper.idle_bytes == sum(device.locked.values())
    assert max(found) <= MOST_LOCKS


MOST_LOCKS = 7
"""Of a loader: two slabs, and one piece more than may be outstanding."""


def test_copies_of_a_loader_begin_without_memory(device):
    """Pickles and copies, which may go to other processes."""
    run_epoch(loader := in_threads())
    for other in (pickle.loads(pickle.dumps(loader)), copy.copy(loader), copy.deepcopy(loader)):
        assert state_of(other).keeper is None
    num_keepers = len(keepers.now())
    run_epoch(dataset := of_pipeline())
    copied = copy.deepcopy(dataset)
    assert len(keepers.now()) == num_keepers + 1
    run_epoch(copied)
    assert len(keepers.now()) == num_keepers + 2


def test_forked_process_does_not_use_what_its_parent_keeps(device, monkeypatch):
    """Nor does it ask the parent's events, or unlock."""
    run_epoch(loader := without_workers())
    num_locks = device.num_locks
    monkeypatch.setattr(kept.os, "getpid", partial(int, os.getppid()))
    run_epoch(loader)
    assert device.num_locks == 2 * num_locks
    assert device.num_unlocks == 0
    monkeypatch.undo()


# -- when it is wanted -----------------------------------------------------------------------------


def test_memory_that_is_kept_goes_to_who_is_refused_more(device):
    """What the system lets this process lock is enough for one of the loaders."""
    run_epoch(first := without_workers())
    assert device.locked
    device.most_bytes = sum(device.locked.values())
    run_epoch(second := without_workers())
    assert [each.idle_bytes > 0 for each in keepers.now()] == [False, True]
    run_epoch(first)
    assert [each.idle_bytes > 0 for each in keepers.now()] == [True, False]
    assert sum(device.locked.values()) <= device.most_bytes
    del second


def test_refusal_stays_one_where_nothing_is_kept(device):
    """The system is asked once: a loader that has begun keeps nothing yet."""
    device.most_bytes = 0
    keeper = TransferKeeper()
    with closing(mapped(SMALL_BYTES)) as memory:
        backend = cuda.CudaBackend(torch.device("cuda", 0))
        address = np.frombuffer(memory, np.uint8).ctypes.data
        assert not backend.lock_pages(address, SMALL_BYTES)
    assert (device.num_locks, keepers.now()) == (1, [keeper])


@contextmanager
def available(num_bytes, monkeypatch):
    """A machine that has so much memory left."""
    limits = Limits(num_cores=2, memory_bytes=num_bytes)
    with monkeypatch.context() as patch:
        patch.setattr(kept.Limits, "of_this_machine", lambda: limits)
        yield


@pytest.fixture
def loaders(device):
    """Three that have had an epoch."""
    made = [without_workers() for _ in range(3)]
    for loader in made:
        run_epoch(loader)
    return made


def test_loaders_that_wait_keep_a_share_of_the_memory(loaders, monkeypatch):
    """The oldest lets go first when another begins; one that has its memory takes nobody's."""
    sizes = [each.idle_bytes for each in keepers.now()]
    with available(8 * sum(sizes) - 1, monkeypatch):
        run_epoch(loaders[1])
        assert all(each.idle_bytes for each in keepers.now())
        run_epoch(new := without_workers())
        assert [each.idle_bytes > 0 for each in keepers.now()] == [False, True, True, True]
    with available(0, monkeypatch):
        run_epoch(without_workers())
        assert not any(each.idle_bytes for each in keepers.now()[:4])
    del new


# -- shared memory of processes --------------------------------------------------------------------


@pytest.fixture
def file():
    """One in memory, of 16 MiB that were written."""
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, size := 16 << 20)
    with mmap.mmap(descriptor, size) as memory:
        memory[:] = b"\1" * size
    yield descriptor, size
    os.close(descriptor)


def num_turns_of_another_thread(act):
    """How often another thread has the GIL while this one acts."""
    turns, is_over = [0], threading.Event()

    def turn():
        while not is_over.is_set():
            turns[0] += 1
            time.sleep(0)  # lets the GIL go

    interval = sys.getswitchinterval()
    sys.setswitchinterval(3600)  # nobody has to let it go
    thread = threading.Thread(target=turn)
    try:
        thread.start()
        until(lambda: turns[0])
        before = turns[0]
        act()
        return turns[0] - before
    finally:
        is_over.set()
        sys.setswitchinterval(interval)
        thread.join()


def test_shared_memory_is_mapped_without_the_gil(file):
    """With all of its pages, as another process wrote them. A control: ``find`` has the GIL."""
    until(lambda: num_turns_of_another_thread(lambda: mapped_file(*file)))
    memory = mapped_file(*file)
    assert (np.frombuffer(memory, np.uint8) == 1).all()
    assert num_turns_of_another_thread(lambda: memory.find(b"\2")) == 0
