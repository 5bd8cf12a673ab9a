"""Workers: how many there are, how long they stay, what is their own."""

import itertools
import queue
import threading
from collections import namedtuple
from dataclasses import dataclass
from itertools import islice
from unittest import mock

import pytest
import torch
from support.datasets import BulkData, GatedData, Indices, Made, MapData
from support.gates import switching
from support.inside import forget_iterator
from support.loaders import (
    PATIENCE_SECONDS,
    DataLoader,
    ModelLoader,
    ThreadLoader,
    assert_threads_end,
    batches_of,
    epoch_of,
    loader_threads,
    run_script,
    torch_loader,
)
from torch.utils.data import (
    ConcatDataset,
    Dataset,
    IterableDataset,
    StackDataset,
    Subset,
    default_collate,
    get_worker_info,
)

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


def test_threads_end_with_their_epoch():
    """While its iterator is still kept; and those of one that nobody asked for a batch."""
    kept = iter(ThreadLoader(data8, num_workers=2))
    threads = loader_threads()
    assert len(threads) >= 2
    assert len(list(kept)) == 8
    assert_threads_end(threads)
    iter(ThreadLoader(data8, num_workers=2))
    assert_threads_end()


@pytest.mark.parametrize(("num_workers", "batch_size"), [(2, 1), (2, 20), (5, 1), (5, 20)])
def test_as_many_samples_load_at_once_as_workers(num_workers, batch_size):
    """And never more; one sample is one task: of a single batch, too."""
    together, inside, counts = threading.Barrier(num_workers), set(), []

    def meet(index):
        inside.add(index)
        counts.append(len(inside))
        together.wait(PATIENCE_SECONDS)
        inside.remove(index)
        return index

    loader = ThreadLoader(Made(meet, 20), batch_size, num_workers=num_workers, collate_fn=list)
    assert list(itertools.chain(*loader)) == list(range(20))
    assert max(counts) == num_workers


def test_worker_info_is_none_in_the_main_thread_while_workers_run():
    """A worker in the middle of a sample does not make the trainer a worker, and torch's own
    processes have theirs beside ours. Without workers samples are made there."""
    data = Made(lambda _: (threading.current_thread(), get_worker_info()), 2)
    here = threading.current_thread(), None
    assert list(DataLoader(data, collate_fn=list)) == [[here]] * 2
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
        epochs.append([batches_of(loader) for _ in range(3)])
    assert epochs[0] == epochs[1]
    assert [len(each) for each in epochs[1]] == [4, 4, 4]


class OneDict(Indices):
    """Its copies would have one ``__dict__`` between them, as Hugging Face's streams have."""

    def __getstate__(self):
        return self.__dict__

    def __setstate__(self, state):
        self.__dict__ = state


Pair = namedtuple("Pair", "left right")
Listed = type("Listed", (list,), {})


@dataclass
class Holder(Dataset):
    """Datasets in an attribute."""

    parts: object


HOLDERS = {
    "itself": (lambda data: data, lambda own: own),
    "StackDataset of names": (lambda data: StackDataset(x=data), lambda own: own.datasets["x"]),
    "namedtuple": (lambda data: Holder(Pair(data, data)), lambda own: own.parts.right),
    "tuple": (lambda data: Holder((data, 3)), lambda own: own.parts[0]),
    "list": (lambda data: Holder(Listed([data])), lambda own: own.parts[0]),
    "deep": (
        lambda data: Subset(ConcatDataset([Subset(data, [2])]), [0]),
        lambda own: own.dataset.datasets[0].dataset,
    ),
}


@pytest.mark.parametrize("kind", HOLDERS)
def test_attributes_of_a_copy_are_its_own(kind):
    """Apart from the trainer's dataset and from the other workers', wherever the dataset is."""
    wrap, find = HOLDERS[kind]
    data, copies = OneDict(), {}
    holder = wrap(data)

    def begin(number):
        copies[number] = get_worker_info().dataset
        find(copies[number]).owner = number

    assert list(ThreadLoader(holder, None, sampler=[], num_workers=2, worker_init_fn=begin)) == []
    assert [find(copies[number]).owner for number in range(2)] == [0, 1]
    assert {type(find(own)) for own in copies.values()} == {OneDict}
    assert not hasattr(data, "owner")
    assert type(getattr(copies[0], "parts", None)) is type(getattr(holder, "parts", None))


class Counter:
    """Counts its calls without a lock."""

    calls = 0

    def __call__(self):
        self.calls += 1
        return self


class Opening(Indices):
    """Opens its file in each worker, collates with it, and keeps something between samples."""

    handle = "closed"

    def __init__(self):
        super().__init__()
        self.transform, self.table = Counter(), [*range(12)]

    def __getitem__(self, index):
        return self.handle, id(self.transform()), self.table

    def open(self, worker_id):
        self.handle = f"file {worker_id}"

    def collate(self, samples):
        assert samples[0][0] == self.handle
        return samples[0]


@pytest.mark.parametrize("loader_class", [DataLoader, ThreadLoader])
def test_what_a_worker_leaves_in_its_dataset_is_its_own(loader_class):
    """Bound methods act on the worker's copy, as in a forked worker; a transform that keeps state
    is each worker's own; a big table is the trainer's."""
    dataset, found = Opening(), {}
    functions = {"worker_init_fn": dataset.open, "collate_fn": dataset.collate}
    for opened, transform, table in loader_class(dataset, num_workers=2, **functions):
        assert loader_class is DataLoader or table is dataset.table
        found.setdefault(opened, set()).add(transform)
    assert found.keys() <= {"file 0", "file 1"}
    if loader_class is ThreadLoader:
        assert all(len(own) == 1 for own in found.values())
        assert len(set.union(*found.values())) == len(found)
    assert (dataset.handle, dataset.transform.calls) == ("closed", 0)


def test_dataset_that_cannot_be_copied_still_loads(caplog):
    """A forked worker needs no copy protocol; a thread shares what it cannot copy, and says so."""

    class Uncopyable(MapData):
        def __copy__(self):
            raise TypeError("cannot copy this")

    loader = ThreadLoader(Uncopyable(8), num_workers=2)
    assert epoch_of(loader) == epoch_of(torch_loader(MapData(8)))
    assert "Uncopyable cannot be copied (TypeError: cannot copy this)" in caplog.text


class Awkward(Indices):
    """Something that only loaders look at goes wrong."""

    @property
    def dataset(self):
        raise KeyError("not opened yet")

    @property
    def state_dict(self):
        raise KeyError("not opened yet")

    def __copy__(self):
        raise SystemExit("cannot be copied")


def test_error_before_a_worker_is_ready_is_the_loops():
    """It comes as an error of ``worker_init_fn`` does, at the first batch; nobody waits for it.
    Attributes that torch does not look at decide nothing."""
    assert batches_of(DataLoader(Awkward(), 4)) == batches_of(torch_loader(Awkward(), 4))
    batches = iter(ThreadLoader(Awkward(), 4, num_workers=2))
    with pytest.raises(RuntimeError, match="cannot be copied") as caught:
        next(batches)
    assert type(caught.value.__cause__) is SystemExit
    assert "in copying the dataset" in caught.value.__notes__[0]
    assert next(batches, None) is None


@pytest.mark.parametrize("loader_class", [ThreadLoader, DataLoader, torch_loader])
@pytest.mark.parametrize("rng", ["sample", "worker"])
def test_stuck_worker_does_not_stop_the_others(loader_class, rng):
    """Out of order, all that others can make comes while one is stuck, as with torch's: of 12
    samples two places in all stay with the stuck worker, and 30 items are the other's."""
    from torch import multiprocessing

    gate = multiprocessing.get_context("fork").Event()

    def stuck_at_0(number):
        assert number or gate.wait(2 * PATIENCE_SECONDS)
        return number

    class Stream(IterableDataset):
        def __iter__(self):
            stuck_at_0(get_worker_info().id)
            return iter(range(30))

    data, count = (Stream(), 30) if rng == "sample" else (Made(stuck_at_0), 9)
    given = {} if loader_class is torch_loader else {"rng": rng}
    batches = iter(
        loader_class(data, num_workers=2, in_order=False, timeout=PATIENCE_SECONDS, **given)
    )
    try:
        found = sorted(batch.item() for batch in islice(batches, count))
    finally:
        gate.set()
    assert len(found) == count
    assert rng == "worker" or found == list(range(30))


def test_timeout_holds_for_the_start_of_threads(monkeypatch):
    """Which iter() waits for, and so for a worker_init_fn that hangs."""
    monkeypatch.setattr("spdl_torch.loader.backends.threads._LEAST_START_SECONDS", 0.1)
    gate = threading.Event()
    loader = ThreadLoader(
        MapData(4), num_workers=2, timeout=0.1, worker_init_fn=lambda _: gate.wait(PATIENCE_SECONDS)
    )
    with pytest.raises(RuntimeError, match=r"timed out after 0\.1 seconds in iter\(\)"):
        iter(loader)
    gate.set()
    assert len(list(loader)) == 4


@pytest.mark.parametrize("most", [0, 2])
def test_threads_end_when_the_system_has_no_more(monkeypatch, most):
    """Threads that were started end, and the next epoch begins as if nothing had happened."""
    start, started = threading.Thread.start, []

    def start_some(thread):
        if thread.name.startswith("spdl-loader"):
            if len(started) >= most:
                raise RuntimeError("can't start new thread")
            started.append(thread)
        start(thread)

    loader = ThreadLoader(Indices(), 2, num_workers=4)
    monkeypatch.setattr(threading.Thread, "start", start_some)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        iter(loader)
    monkeypatch.undo()
    assert len(started) == most
    assert_threads_end()
    assert len(batches_of(loader)) == 6


def test_workers_copy_the_dataset_one_after_another():
    """Python 3.11 crashes in a later garbage collection if two threads look at the ``__dict__`` of
    one object for the first time, which is what copying does. No other loader waits for it."""
    copying, met = threading.Lock(), []

    class Copied(MapData):
        def __copy__(self):
            met.append(copying.acquire(blocking=False))
            epoch_of(ThreadLoader(MapData(4), num_workers=2))
            copying.release()
            return MapData(len(self))

    with switching():
        for _ in range(5):
            assert len(epoch_of(ThreadLoader(Copied(8), num_workers=4))) == 8
    assert met == [True] * 20


def test_sampler_that_answers_to_every_name_is_no_endless_search():
    """As tests of frameworks pass them."""
    inner = mock.Mock(spec=[])
    inner.sampler = inner
    for sampler in (mock.Mock(), mock.MagicMock(), inner):
        assert DataLoader(range(3), sampler=sampler).sampler is sampler


def test_failing_thread_of_the_loader_is_no_hang(monkeypatch, caplog):
    """A bug in the loader itself raises in the loop, and the log has the traceback."""

    def fail(*_args, **_cells):
        raise LookupError("a mistake of ours")

    loader = ThreadLoader(Indices(), 2, num_workers=2)
    monkeypatch.setattr("spdl_torch.loader.backends.worker_thread.record_parts", fail)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no fault of the dataset: LookupError"):
            next(iter(loader))
    assert "in fail" in caplog.text
    monkeypatch.undo()
    assert len(batches_of(loader)) == 6
