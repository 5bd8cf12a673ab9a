"""Pinned memory is locked once for a loader, not in each epoch, and goes when it is wanted."""

from __future__ import annotations

import gc
import sys
from functools import partial
from itertools import islice

import pytest
import torch
from support.forks import found_in_fork
from support.gates import Boom
from support.gpus import Filled
from support.lazy_device import LazyDevice, install, put_to_rest
from support.loaders import assert_threads_end

from spdl_torch import DataLoader, PipelineDataset
from spdl_torch.io import batch_storage
from spdl_torch.io._transfer.region import keepers
from spdl_torch.io._transfer.slabs import SMALL_BYTES
from spdl_torch.pipeline import PipelineBuilder, StatsQueue

COUNT = 12
# Two are the smallest batch that is made in pinned memory, and the smallest slab.
DATA = Filled([SMALL_BYTES // 2] * COUNT)


def in_storage(index):
    """An op that makes its item in memory that can be copied from."""
    return batch_storage().tensor((SMALL_BYTES,)).fill_(index)


class CountingDevice(LazyDevice):
    num_locks = 0

    def cudaHostRegister(self, *args):
        self.num_locks += 1
        return super().cudaHostRegister(*args)


@pytest.fixture
def device(monkeypatch):
    """In place of CUDA; others' loaders keep nothing there."""
    keepers.clear()
    install(device := CountingDevice(is_prompt=True), monkeypatch.setattr)
    yield device
    put_to_rest()
    gc.collect()
    assert device.violations == []


def loader(num_workers=2, **options):
    return DataLoader(DATA, 2, device="cuda", num_workers=num_workers, **options)


without_workers = partial(loader, 0)
in_threads = partial(loader, isolation="thread")
in_processes = partial(loader, isolation="process")


def of_pipeline(**options):
    stages = PipelineBuilder().add_source(range(COUNT)).pipe(in_storage).add_sink(1)
    return PipelineDataset(stages, device="cuda", **options)


IN_THIS_PROCESS = [without_workers, in_threads, of_pipeline]


def run_epoch(batches):
    """Its batches are right, and nothing of it is left."""
    found = []
    for batch in batches:
        assert (batch == batch[..., :1]).all()
        found += batch[..., 0].flatten().tolist()
    assert found == list(range(len(found)))
    del batch
    assert_threads_end()


def test_memory_comes_back_from_a_pipeline_that_could_not_be_made(device):
    """The next pass has it."""
    refuses = []

    class Queue(StatsQueue):
        def __init__(self, *args, **options):
            if refuses:
                raise Boom("no queue")
            super().__init__(*args, **options)

    run_epoch(dataset := of_pipeline(queue_class=Queue))
    refuses.append(True)
    with pytest.raises(Boom, match="no queue"):
        next(iter(dataset))
    refuses.clear()
    run_epoch(dataset)
    assert device.num_locks == len(device.locked) >= 3


@pytest.mark.parametrize("make", IN_THIS_PROCESS)
def test_memory_is_locked_once_however_epochs_end(device, make):
    """That of the transfer, and that in which batches are made."""
    loader = make()
    for length in (None, 2, 2, None):
        run_epoch(islice(loader, length))
    assert device.num_locks == len(device.locked) >= 3


@pytest.mark.parametrize("pins", [True], indirect=True)
@pytest.mark.parametrize("make", [*IN_THIS_PROCESS, in_processes])
def test_three_slabs_are_all_where_batches_are_pinned_at_the_hand_over(device, make, pins):
    """Whoever makes them; all are there before the first step."""
    batches = iter(loader := make())
    next(batches)
    assert len(device.torchs) == 3
    del batches
    assert_threads_end()
    for _ in range(2):
        run_epoch(loader)
    assert len(device.torchs) == len(device.locked) == 3


@pytest.mark.parametrize("make", [*IN_THIS_PROCESS, in_processes])
def test_memory_goes_with_the_loader(device, make):
    """Nothing is locked any more, and nobody is asked for it."""
    run_epoch(loader := make())
    assert device.locked
    del loader
    gc.collect()
    assert device.locked == {}
    assert not keepers.now()


for_the_host = partial(DataLoader, DATA, 2, num_workers=2, isolation="process")


@pytest.mark.parametrize("make", [*IN_THIS_PROCESS, in_processes, for_the_host])
def test_no_python_runs_as_the_loop_drops_a_batch(device, make):
    """Ctrl-C would come there now and then, be printed, and lost."""
    calls = []

    def note(frame, event, _):
        if event == "call":
            calls.append(frame.f_code.co_name)

    for batch in make():
        gc.disable()
        sys.setprofile(note)
        del batch
        sys.setprofile(None)
        gc.enable()
    assert calls == []


def test_memory_stays_with_the_process_that_locked_it(device):
    """A child that drops its copy of an iterator keeps nothing."""
    batches = iter(without_workers())
    next(batches)
    (keeper,) = keepers.now()

    def bytes_kept():
        nonlocal batches
        del batches
        gc.collect()
        return keeper.idle_bytes

    assert found_in_fork(bytes_kept) == 0
    assert bytes_kept() > 0


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
    assert max(found) <= 7, "two slabs, and one piece more than may be outstanding"
