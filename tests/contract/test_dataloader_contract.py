"""The promises of torch's DataLoader beyond the batches, and those that only threads can keep."""

import itertools
import queue
import signal
import threading

import _warm
import pytest
import torch
from _datasets import BulkData, GatedData, Made, MapData, StreamData
from _inside import forget_iterator
from _loader_helpers import (
    PATIENCE_SECONDS,
    DataLoader,
    ModelLoader,
    ThreadLoader,
    as_list,
    assert_threads_end,
    epoch_of,
    loader_threads,
    run_script,
    script,
    torch_loader,
)
from torch.utils.data import default_collate, get_worker_info

data8 = MapData(8)


def test_persistent_workers_stay_until_their_iterator_is_dropped():
    """One iterator: asked in mid-epoch it starts over, and what was under way is dropped. Lightning
    shuts a loader down by ``_iterator = None``."""
    loader = ThreadLoader(range(8), None, num_workers=2, persistent_workers=True, prefetch_factor=3)
    batches = iter(loader)
    assert iter(batches) is batches
    threads = loader_threads()
    assert len(threads) >= 2
    assert [next(batches), next(batches)] == [0, 1]
    assert iter(loader) is batches
    assert list(batches) == list(loader) == list(range(8))
    assert loader_threads() == threads
    del batches
    forget_iterator(loader)
    assert_threads_end(threads)
    assert len(list(loader)) == 8


@pytest.mark.parametrize("num_workers", [2, 5])
@pytest.mark.parametrize("batch_size", [1, 20])
def test_as_many_samples_load_at_once_as_workers(num_workers, batch_size):
    """num_workers=N means that N samples are loaded at the same time, and never more; one sample is
    one task: of a single batch, too."""
    together, lock, inside, counts = threading.Barrier(num_workers), threading.Lock(), set(), []

    def meet(index):
        with lock:
            inside.add(index)
            counts.append(len(inside))
        together.wait(PATIENCE_SECONDS)
        with lock:
            inside.remove(index)
        return index

    loader = ThreadLoader(Made(meet, 20), batch_size, num_workers=num_workers, collate_fn=as_list)
    assert sum(loader, []) == list(range(20))  # noqa: RUF017
    assert max(counts) == num_workers


def test_worker_info_is_none_in_the_main_thread_while_workers_run():
    """A worker in the middle of a sample does not make the trainer a worker, and torch's own
    processes have theirs beside ours. Without workers samples are made there."""
    data = Made(lambda _: (threading.current_thread(), get_worker_info()), 2)
    here = threading.current_thread(), None
    assert list(DataLoader(data, collate_fn=as_list)) == [[here]] * 2
    dataset = GatedData(2)
    batches = iter(ThreadLoader(dataset, None, num_workers=1))
    assert dataset.entered.wait(PATIENCE_SECONDS)
    assert get_worker_info() is None
    theirs = torch_loader(range(2), num_workers=2, collate_fn=lambda _: get_worker_info().id)
    assert list(theirs) == [0, 1]
    dataset.gate.set()
    assert list(batches) == [0, 1]


@pytest.mark.parametrize("dataset", [[1] * 4, MapData(4), BulkData(4)], ids=type)
def test_batches_are_not_in_shared_memory(dataset):
    """default_collate puts batches into /dev/shm when it believes to be in a process worker."""
    for collate_fn in (None, lambda samples: default_collate(samples)):
        for batch in ThreadLoader(dataset, num_workers=2, batch_size=2, collate_fn=collate_fn):
            tensors = [batch] if isinstance(batch, torch.Tensor) else [batch["x"], batch["y"]]
            assert not any(tensor.is_shared() for tensor in tensors)


def test_intra_op_threads_are_the_trainers_own_setting():
    """Workers take one thread each; the trainer keeps its own, a default or one it has set."""
    done = run_script(
        """
        import torch

        class Data(torch.utils.data.Dataset):
            def __len__(self):
                return 4

            def __getitem__(self, index):
                torch.rand(100, 100) @ torch.rand(100, 100)
                return torch.get_num_threads()

        def inside(isolation):
            loader = DataLoader(Data(), num_workers=2, isolation=isolation)
            return [batch.item() for batch in loader]

        for isolation in ("thread", "process"):
            print(inside(isolation), torch.get_num_threads())
        torch.set_num_threads(3)
        print(inside("thread"), torch.get_num_threads())
        """,
        OMP_NUM_THREADS="2",
        MKL_NUM_THREADS="2",
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["[1, 1, 1, 1] 2"] * 2 + ["[1, 1, 1, 1] 3"]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="memory can be pinned here")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_pin_memory_warns_without_accelerator(num_workers):
    """torch's warning, and the same batches."""
    loader = DataLoader(data8, num_workers=num_workers, pin_memory=True)
    with pytest.warns(UserWarning, match="no accelerator is found"):
        batches = epoch_of(loader)
    assert batches == epoch_of(torch_loader(data8))


@pytest.mark.parametrize("kind", [MapData, StreamData])
@pytest.mark.parametrize("how", ["exhausted", "unused", "error kept"])
def test_threads_end_with_their_epoch(kind, how):
    """An exhausted iterator keeps no thread, even while it is still referenced; nor does an error
    whose frames lead to it, or one that nobody asked for a batch."""
    data = kind(9, {0: KeyError} if how == "error kept" else {})
    batches = iter(ThreadLoader(data, num_workers=2))
    threads = loader_threads()
    assert len(threads) >= 2
    if how == "exhausted":
        assert len(list(batches)) in (9, 18)
        assert_threads_end(threads)
    elif how == "error kept":
        with pytest.raises(KeyError, match="bad 0") as kept:
            next(batches)
        assert kept.traceback
    del batches
    assert_threads_end(threads)


BLOCKS = r"""
import os, signal, threading
import torch

class Blocked(torch.utils.data.Dataset):
    def __len__(self):
        return 1000

    def __getitem__(self, index):
        os.write(1, b"blocked\n")
        threading.Event().wait()

signal.signal(signal.SIGINT, signal.default_int_handler)
for batch in DataLoader(Blocked(), num_workers=1, isolation="thread"):
    pass
"""


def test_ctrl_c_ends_the_program_when_a_worker_blocks():
    """KeyboardInterrupt wakes the waiting trainer at once; the process dies of it."""
    with _warm.start(["-c", script(BLOCKS)]) as child:
        try:
            assert child.stdout.readline() == "blocked\n"
            child.send_signal(signal.SIGINT)
            _, stderr = child.communicate(timeout=4 * PATIENCE_SECONDS)
        finally:
            child.kill()
    assert stderr.rstrip().endswith("KeyboardInterrupt")
    assert stderr.count("Traceback") == 1
    assert child.returncode == -signal.SIGINT


def one_iterator(base):
    """Workers live for all epochs, of which one iterator has the batches. Its batch sampler without
    end is set past the class, which refuses it after ``__init__``."""

    class Loader(base):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.num_batches = len(self.batch_sampler)
            without_end = itertools.chain.from_iterable(itertools.repeat(self.batch_sampler))
            object.__setattr__(self, "batch_sampler", without_end)
            self.iterator = super().__iter__()

        def __iter__(self):
            return itertools.islice(self.iterator, self.num_batches)

    return Loader


def in_background(base):
    """Another thread iterates, two batches ahead of the loop."""

    class Loader(base):
        def __iter__(self):
            taken = queue.Queue(2)

            def run():
                for item in super(Loader, self).__iter__():
                    taken.put(item)
                taken.put(None)

            threading.Thread(target=run, daemon=True).start()
            return iter(taken.get, None)

    return Loader


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"persistent_workers": True}])
@pytest.mark.parametrize("subclass", [one_iterator, in_background])
def test_subclass_has_the_batches_of_torchs(subclass, options):
    """In three epochs."""
    epochs = []
    options = {"shuffle": True, "num_workers": 2 if options else 0, **options}
    for base in (ModelLoader, DataLoader):
        torch.manual_seed(0)
        loader = subclass(base)(range(13), 4, **options)
        epochs.append([[batch.tolist() for batch in loader] for _ in range(3)])
    assert epochs[0] == epochs[1]
    assert [len(each) for each in epochs[1]] == [4, 4, 4]
