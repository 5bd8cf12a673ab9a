"""The promises of torch's DataLoader beyond the batches, and those that only threads can keep."""

from __future__ import annotations

import copy
import gc
import inspect
import os
import pickle
import signal
import threading
import weakref

import _warm
import psutil
import pytest
import torch
from _datasets import (
    Bad,
    BulkData,
    GatedData,
    MapData,
    StreamData,
    WorkerInfoData,
)
from _gates import eager_switching, named, until
from _inside import crew_of, forget_iterator, shift_of
from _loader_helpers import (
    PATIENCE_SECONDS,
    DataLoader,
    ThreadLoader,
    TorchIterator,
    as_list,
    assert_threads_end,
    epoch_of,
    loader_threads,
    run_script,
    script,
    swap_batch_sampler,
    torch_loader,
)
from torch.utils.data import (
    Dataset,
    IterableDataset,
    SequentialSampler,
    default_collate,
    get_worker_info,
)
from torch.utils.data.datapipes.iter import IterableWrapper

from spdl_torch.errors import UnsupportedOptionError
from spdl_torch.loader.backends.epoch import Epoch
from spdl_torch.observe import recording

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
# From Python 3.12 on a fork beside threads, such as fsspec's of an earlier test, is warned of.
other_threads = pytest.mark.filterwarnings("ignore:.*is multi-threaded:DeprecationWarning")
TorchLoader = torch.utils.data.DataLoader
data8 = MapData(8)
sampler8 = SequentialSampler(data8)
READ_BY_FRAMEWORKS = [
    *("dataset", "batch_size", "num_workers", "drop_last", "collate_fn", "pin_memory"),
    *("pin_memory_device", "timeout", "worker_init_fn", "generator", "prefetch_factor"),
    *("persistent_workers", "in_order", "multiprocessing_context", "_dataset_kind"),
    *("_auto_collation", "_IterableDataset_len_called", "_iterator", "_DataLoader__initialized"),
]


# Building a loader


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batch_size": 4, "shuffle": True, "drop_last": True},
        {"batch_size": None},
        {"sampler": sampler8},
        {"batch_sampler": [[0, 1], [2]]},
        {"num_workers": 2},
        {"num_workers": 1, "prefetch_factor": 5, "persistent_workers": True, "timeout": 9},
        {"num_workers": 1, "worker_init_fn": print, "in_order": False, "collate_fn": as_list},
        {"generator": torch.Generator()},
    ],
    ids=named,
)
def test_attributes_equal_torchs_after_construction(options):
    """Frameworks read these to rebuild a loader; every one has torch's value."""
    ours, torchs = DataLoader(data8, **options), torch_loader(data8, **options)
    for name in READ_BY_FRAMEWORKS:
        assert getattr(ours, name) == getattr(torchs, name), name
    assert type(ours.sampler) is type(torchs.sampler)
    assert type(ours.batch_sampler) is type(torchs.batch_sampler)
    assert ours._index_sampler is (ours.batch_sampler or ours.sampler)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loader_carries_one_private_attribute_beside_torchs(num_workers):
    """Before an epoch, in one, and after it, recorded or not: what we remember is behind it."""
    ours, torchs = DataLoader(data8, num_workers=num_workers), torch_loader(data8)
    for _ in range(2):
        with recording(ours, logger=[]):
            for _ in ours:
                added = vars(ours).keys() - vars(torchs).keys()
                assert {name for name in added if name.startswith("_")} == {"_state"}
    assert not any(name.startswith("_") for name in vars(ours).keys() - {*vars(torchs), "_state"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"timeout": 3}, "timeout"),
        ({"num_workers": 1, "prefetch_factor": 0}, "prefetch_factor must be"),
    ],
)
def test_iteration_error_is_torchs_when_options_cannot_work(options, message):
    """Options that torch accepts at construction and refuses at iter() are refused at iter()."""
    loader = DataLoader(data8, **options)
    with pytest.raises(AssertionError, match=message):
        iter(loader)


def test_unknown_keyword_is_refused():
    """A typing error in an option's name is never swallowed."""
    with pytest.raises(TypeError, match="num_worker"):
        DataLoader(data8, num_worker=2)


def test_signature_is_torchs_with_keyword_only_extras():
    """Positional calls written for torch mean the same; the extras need their names."""
    theirs = inspect.signature(TorchLoader.__init__).parameters
    ours = inspect.signature(DataLoader.__init__).parameters
    assert [name for name in ours if name in theirs] == list(theirs)
    for name, parameter in theirs.items():
        assert (ours[name].kind, ours[name].default) == (parameter.kind, parameter.default), name
    extras = {name: ours[name] for name in ours if name not in theirs}
    assert {name: extra.default for name, extra in extras.items()} == {
        "device": None,
        "isolation": "auto",
        "seed": None,
        "rng": "sample",
        "on_error": "raise",
        "error_budget": None,
        "replace": False,
        "stats": True,
        "snapshot_every_n_steps": 1,
    }
    assert {extra.kind for extra in extras.values()} == {inspect.Parameter.KEYWORD_ONLY}


def test_extras_are_kept_under_their_names():
    """Lightning rebuilds a loader from attributes named like the parameters."""
    extras = {"device": "cpu", "isolation": "process", "seed": 5, "rng": "worker", "stats": False}
    loader = DataLoader(data8, num_workers=1, **extras)
    assert {name: getattr(loader, name) for name in extras} == extras
    assert epoch_of(loader) == epoch_of(TorchLoader(data8))


@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu")])
def test_device_is_accepted_when_it_is_the_cpu(device):
    """Batches are on the CPU anyway."""
    assert next(iter(DataLoader([1, 2], num_workers=1, device=device))).device.type == "cpu"


def test_process_is_refused_when_there_are_no_workers():
    """The message says what to pass."""
    with pytest.raises(UnsupportedOptionError, match=r"isolation=.*num_workers=0.*num_workers=1"):
        DataLoader(data8, isolation="process")


def test_datapipe_is_refused():
    """torch has deprecated them; their shared seed and sharding are not taught to threads."""
    with pytest.raises(UnsupportedOptionError, match="DataPipe"):
        DataLoader(IterableWrapper([1, 2]))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("isolation", "fibre"),
        ("on_error", "ignore"),
        ("rng", None),
        ("rng", "batch"),
        ("seed", "7"),
        ("seed", 1.5),
        ("seed", True),
    ],
)
def test_option_is_refused_when_its_value_is_unknown(name, value):
    """A typing error is not taken for the default."""
    with pytest.raises(ValueError, match=f"{name}.*{value}"):
        DataLoader(data8, **{name: value})


def test_loader_is_a_torch_loader_that_can_be_subscripted():
    """isinstance checks and annotations of user code hold."""
    assert isinstance(DataLoader(data8), TorchLoader)

    class Subscripted(DataLoader[int]):
        """A user's typed loader."""

    assert epoch_of(Subscripted([1, 2], num_workers=1)) == epoch_of(TorchLoader([1, 2]))


@pytest.mark.parametrize(
    "name", ["batch_size", "batch_sampler", "sampler", "drop_last", "dataset", "persistent_workers"]
)
def test_attribute_cannot_be_set_when_torch_forbids_it(name):
    """Same six attributes, same message."""
    loader = DataLoader(data8, num_workers=1)
    expected = f"{name} attribute should not be set after DataLoader is initialized"
    with pytest.raises(ValueError, match=expected):
        setattr(loader, name, getattr(loader, name))


def test_attributes_set_after_construction_are_read_at_iter():
    """Lightning sets worker_init_fn and collate_fn on a finished loader."""
    started = []
    loader = ThreadLoader([1, 2, 3], num_workers=1)
    loader.collate_fn = as_list
    loader.worker_init_fn = started.append
    loader.num_workers = 2
    assert list(loader) == [[1], [2], [3]]
    assert sorted(started) == [0, 1]


def test_batch_sampler_can_be_replaced_as_timm_does():
    """timm lowers the initialized flag to swap in an endless batch sampler."""
    loader = DataLoader(range(4), batch_size=2, num_workers=2, collate_fn=as_list)
    swap_batch_sampler(loader, [[3], [2, 1]])
    assert list(loader) == [[3], [2, 1]]


@pytest.mark.parametrize("duplicate", [copy.copy, lambda it: pickle.loads(pickle.dumps(it))])
def test_loader_can_be_copied_and_pickled(duplicate):
    """A copy is a loader of the same class with the same options and batches."""
    loader = DataLoader(data8, batch_size=3, num_workers=2, stats=False)
    list(loader)
    other = duplicate(loader)
    assert type(other) is DataLoader
    assert other.stats is False
    assert epoch_of(other) == epoch_of(loader)


def test_iterator_cannot_be_pickled():
    """As torch's; Lightning leaves iterators out of its state by their base class."""
    batches = iter(DataLoader(data8, num_workers=1))
    assert isinstance(batches, TorchIterator)
    with pytest.raises(NotImplementedError, match="cannot be pickled"):
        pickle.dumps(batches)


# Length


def test_length_follows_the_sampler_when_it_grows():
    """len() is asked of the sampler each time."""
    grown = [1, 2, 3]
    loader = DataLoader(grown, batch_size=2, num_workers=1)
    assert len(loader) == 2
    grown += [4, 5]
    assert len(loader) == 3
    assert len(iter(loader)) == 3


def test_length_is_a_type_error_when_the_dataset_has_none():
    """Lightning probes for exactly this error."""

    class Endless(IterableDataset):
        """Has no length."""

        def __iter__(self):
            return iter(int, 1)

    with pytest.raises(TypeError, match=r"has no len\(\)"):
        len(DataLoader(Endless(), num_workers=1))


@other_threads
def test_iterable_longer_than_its_length_warns():
    """Two unsplit workers give twice what len(loader) said."""
    loader = DataLoader(StreamData(2), batch_size=None, num_workers=2)
    assert len(loader) == 2
    with pytest.warns(UserWarning, match="Length of IterableDataset") as caught:
        assert len(list(loader)) == 4
    assert sum("Length of" in str(warning.message) for warning in caught) == 2


# Iterators


@pytest.mark.parametrize("num_workers", [0, 2])
def test_two_iterators_of_one_loader_are_independent(num_workers):
    """zip(loader, loader) gives both the whole epoch."""
    loader = DataLoader(range(6), batch_size=2, num_workers=num_workers, collate_fn=as_list)
    assert list(zip(loader, loader, strict=True)) == [([i, i + 1],) * 2 for i in (0, 2, 4)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_exhausted_iterator_stays_exhausted(num_workers):
    """StopIteration is final, and the iterator is its own iterator."""
    batches = iter(DataLoader([1], num_workers=num_workers))
    assert iter(batches) is batches
    assert len(list(batches)) == 1
    for _ in range(2):
        with pytest.raises(StopIteration, match=r"^$"):
            next(batches)


def test_persistent_iterator_starts_over_when_asked_mid_epoch():
    """Same iterator, same threads, a whole new epoch; what was under way is dropped."""
    loader = ThreadLoader(
        range(8), num_workers=2, persistent_workers=True, batch_size=None, prefetch_factor=3
    )
    batches = iter(loader)
    threads = loader_threads()
    assert [next(batches), next(batches)] == [0, 1]
    assert iter(loader) is batches
    assert list(batches) == list(range(8))
    assert list(loader) == list(range(8))
    assert loader_threads() == threads
    del batches, loader
    assert_threads_end(threads)


def test_persistent_threads_end_when_the_iterator_is_dropped():
    """Lightning shuts a loader down by `_iterator = None`."""
    loader = ThreadLoader(range(8), num_workers=2, persistent_workers=True)
    list(loader)
    threads = loader_threads()
    assert len(threads) >= 2
    forget_iterator(loader)
    assert_threads_end(threads)
    assert len(list(loader)) == 8


def test_batches_ahead_are_bounded_by_prefetch_factor():
    """No more samples are taken than prefetch_factor * num_workers batches ahead."""

    begun = []

    class Counted(Dataset):
        """Counts the samples that workers began."""

        def __len__(self):
            return 60

        def __getitem__(self, index):
            begun.append(index)
            return index

    loader = ThreadLoader(Counted(), batch_size=3, num_workers=2, prefetch_factor=2)
    for taken, _ in enumerate(loader, start=1):
        assert len(begun) <= 3 * (taken + 2 * 2)
    assert sorted(begun) == list(range(60))


# Worker threads


class MeetingData(Dataset):
    """A sample is ready when `parties` samples are being loaded at the same time."""

    def __init__(self, length, parties):
        self.length = length
        self.barrier = threading.Barrier(parties)

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.barrier.wait(PATIENCE_SECONDS)
        return index


@pytest.mark.parametrize("num_workers", [2, 5])
def test_as_many_samples_load_at_once_as_workers(num_workers):
    """num_workers=N means that N samples are loaded at the same time."""
    dataset = MeetingData(4 * num_workers, num_workers)
    assert len(list(ThreadLoader(dataset, num_workers=num_workers))) == 4 * num_workers


def test_samples_of_the_first_batch_load_at_once():
    """One sample is one task: the first batch takes all workers."""
    loader = ThreadLoader(MeetingData(4, 4), batch_size=4, num_workers=4)
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3]]


def test_no_more_samples_load_at_once_than_workers():
    """num_workers bounds the load on the disk and the memory."""

    class Crowded(Dataset):
        """Notes how many samples were being loaded at any time."""

        lock = threading.Lock()
        inside = most = 0

        def __len__(self):
            return 40

        def __getitem__(self, index):
            with self.lock:
                Crowded.inside += 1
                Crowded.most = max(Crowded.most, Crowded.inside)
            torch.rand(1000).sort()
            with self.lock:
                Crowded.inside -= 1
            return index

    assert len(list(ThreadLoader(Crowded(), num_workers=3, batch_size=4))) == 10
    assert 1 <= Crowded.most <= 3


def test_zero_workers_load_in_the_calling_thread():
    """num_workers=0 starts no thread and shows no worker info."""
    loader = DataLoader(WorkerInfoData(2), collate_fn=as_list)
    for [(dataset, info, thread)] in loader:
        assert dataset is loader.dataset
        assert info is None
        assert thread is threading.current_thread()


def test_worker_info_is_none_in_the_main_thread_while_workers_run():
    """A worker in the middle of a sample does not make the trainer a worker."""
    dataset = GatedData(1)
    batches = iter(ThreadLoader(dataset, num_workers=1))
    assert dataset.entered.wait(PATIENCE_SECONDS)
    assert get_worker_info() is None
    dataset.gate.set()
    assert next(batches).tolist() == [0]


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_worker_info_of_torchs_own_processes_is_untouched():
    """torch's DataLoader works beside ours, worker info included."""

    class Asking(Dataset):
        """Every sample is the worker's id."""

        def __len__(self):
            return 2

        def __getitem__(self, index):
            return get_worker_info().id

    ours = iter(ThreadLoader(Asking(), num_workers=1))
    next(ours)
    theirs = torch_loader(Asking(), num_workers=2)
    assert [batch.item() for batch in theirs] == [0, 1]


@pytest.mark.parametrize("persistent", [True, False])
def test_worker_init_fn_runs_once_per_worker(persistent):
    """Once per worker, again each epoch unless the workers stay."""
    started = []

    def start(worker_id):
        assert get_worker_info().id == worker_id
        started.append((worker_id, threading.current_thread().name))

    loader = ThreadLoader(
        range(12), num_workers=3, worker_init_fn=start, persistent_workers=persistent
    )
    for _ in range(2):
        list(loader)
    assert sorted(worker_id for worker_id, _ in started) == sorted([0, 1, 2] * (2 - persistent))
    assert all(name.startswith("spdl-") for _, name in started)


@pytest.mark.parametrize("loader_class", [DataLoader, ThreadLoader])
def test_bound_methods_of_the_dataset_act_on_the_workers_copy(loader_class):
    """In a forked worker, dataset.open and the dataset are one; so they are in a thread."""

    class Opening(Dataset):
        """Opens its file in each worker, and collates with it."""

        handle = "closed"

        def __len__(self):
            return 12

        def __getitem__(self, index):
            return self.handle

        def open(self, worker_id):
            self.handle = f"file {worker_id}"

        def collate(self, samples):
            return samples, self.handle

    dataset = Opening()
    loader = loader_class(
        dataset, num_workers=2, worker_init_fn=dataset.open, collate_fn=dataset.collate
    )
    for [loaded_by], collated_by in loader:
        assert loaded_by in ("file 0", "file 1")
        assert collated_by in ("file 0", "file 1")
    assert dataset.handle == "closed"


def test_transform_is_each_workers_own():
    """A transform that keeps state between samples is not shared by two threads."""

    class Transform:
        """Counts its calls without a lock."""

        def __init__(self):
            self.calls = 0

        def __call__(self, item):
            self.calls += 1
            return item, self

    class Data(Dataset):
        """A big list, and a transform as torchvision's datasets have it."""

        def __init__(self):
            self.transform = Transform()
            self.items = list(range(20))

        def __len__(self):
            return 20

        def __getitem__(self, index):
            return (*self.transform(self.items[index]), self.items, get_worker_info().id)

    dataset = Data()
    loader = ThreadLoader(dataset, num_workers=2, batch_size=None, collate_fn=as_list)
    samples = list(loader)
    assert [item for item, *_ in samples] == dataset.items
    assert all(items is dataset.items for _, _, items, _ in samples)
    transform_of = {worker: transform for _, transform, _, worker in samples}
    assert all(transform_of[worker] is transform for _, transform, _, worker in samples)
    assert len({id(transform) for transform in transform_of.values()}) == len(transform_of)
    assert dataset.transform.calls == 0


def test_iterable_is_split_by_worker_init_fn():
    """The recipe of torch's documentation for IterableDataset, word for word in effect."""

    class Span(IterableDataset):
        """The numbers from start to end."""

        def __init__(self):
            self.start, self.end = 3, 11

        def __iter__(self):
            return iter(range(self.start, self.end))

    def split(worker_id):
        span = get_worker_info().dataset
        width = (span.end - span.start) // get_worker_info().num_workers
        span.start += worker_id * width
        span.end = span.start + width

    loader = DataLoader(Span(), num_workers=2, worker_init_fn=split, batch_size=None)
    assert list(loader) == [3, 7, 4, 8, 5, 9, 6, 10]


@pytest.mark.parametrize("collate_fn", [None, lambda samples: default_collate(samples)])
@pytest.mark.parametrize("dataset", [[1] * 4, MapData(4), BulkData(4)], ids=type)
def test_batches_are_not_in_shared_memory(dataset, collate_fn):
    """default_collate puts batches into /dev/shm when it believes to be in a process worker."""
    loader = ThreadLoader(dataset, num_workers=2, batch_size=2, collate_fn=collate_fn)
    if collate_fn is None:
        assert loader.collate_fn is default_collate
    for batch in loader:
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


@other_threads
@pytest.mark.skipif(torch.accelerator.is_available(), reason="memory can be pinned here")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_pin_memory_warns_without_accelerator(num_workers):
    """torch's warning, and the same batches."""
    loader = DataLoader(data8, num_workers=num_workers, pin_memory=True)
    with pytest.warns(UserWarning, match="no accelerator is found"):
        batches = epoch_of(loader)
    assert batches == epoch_of(TorchLoader(data8))


# Errors


class FailingData(Dataset):
    """Raises one prepared exception object, once, at one index.

    It lets go of the error: its traceback leads to the loop that caught it, and so to the iterator.
    """

    def __init__(self, length, index, error):
        self.length = length
        self.index = index
        self.errors = [error]

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if index == self.index:
            raise self.errors.pop()
        return index


@pytest.mark.parametrize("kind", [MapData, BulkData, StreamData])
def test_batches_are_whole_when_one_worker_fails_to_start(kind):
    """The others' batches are whole, and the loop hears of the one that could not start."""

    def start(worker_id):
        if worker_id == 1:
            raise Bad(5, "init")

    loader = ThreadLoader(
        kind(24), num_workers=2, batch_size=4, worker_init_fn=start, collate_fn=as_list
    )
    before, heard = [], False
    try:
        before.extend(loader)
    except Bad:
        heard = True
    assert heard
    assert all(len(batch) == 4 and all(batch) for batch in before)


def test_dataset_that_cannot_be_copied_still_loads(caplog):
    """A forked worker needs no copy protocol; a thread shares what it cannot copy, and says so."""

    class Uncopyable(MapData):
        """Holds something that refuses to be copied."""

        def __copy__(self):
            raise TypeError("cannot copy this")

    loader = ThreadLoader(Uncopyable(8), num_workers=2)
    assert epoch_of(loader) == epoch_of(TorchLoader(data8))
    assert "Uncopyable cannot be copied (TypeError: cannot copy this)" in caplog.text


def test_workers_copy_the_dataset_one_after_another():
    """Python 3.11 crashes in a later garbage collection if two threads look at the ``__dict__`` of
    one object for the first time, which is what copying does.
    """
    copying, met = threading.Lock(), []

    class Copied(MapData):
        """Knows when two copies of it are under way."""

        def __copy__(self):
            alone = copying.acquire(blocking=False)
            for _ in range(2_000):  # time for a thread switch
                pass
            if not alone:
                met.append(threading.current_thread().name)
                raise TypeError("two threads copy at once")
            copying.release()
            return MapData(len(self))

    with eager_switching():
        for _ in range(10):
            assert epoch_of(ThreadLoader(Copied(8), num_workers=4)) == epoch_of(TorchLoader(data8))
    assert not met


def test_copy_of_a_dataset_may_load_with_workers():
    """The turn of a loader's workers keeps no other loader waiting."""

    class Cached(MapData):
        """Fills a copy's cache with a loader of its own."""

        def __copy__(self):
            own = MapData(len(self))
            own.cache = epoch_of(ThreadLoader(Cached.Inner(4), num_workers=2))
            return own

        class Inner(MapData):
            """Copied while the outer one is."""

    assert epoch_of(ThreadLoader(Cached(8), num_workers=2)) == epoch_of(TorchLoader(data8))


def test_loader_closes_after_a_timeout():
    """The blocked thread ends as soon as its sample does."""
    dataset = GatedData(2)
    batches = iter(ThreadLoader(dataset, num_workers=1, timeout=0.05))
    with pytest.raises(RuntimeError, match="timed out after"):
        next(batches)
    del batches
    dataset.gate.set()
    assert_threads_end()


# Ends


@pytest.mark.parametrize("kind", [MapData, BulkData, StreamData])
def test_threads_end_when_the_epoch_is_over(kind):
    """An exhausted iterator keeps no thread, even while it is still referenced."""
    batches = iter(ThreadLoader(kind(9), num_workers=2))
    threads = loader_threads()
    assert len(threads) >= 2
    for _ in batches:
        pass
    assert_threads_end(threads)


def test_threads_end_when_a_worker_lets_go_of_an_error_late(monkeypatch):
    """The one that has just delivered it still refers to it, and so to the frames of a loop that
    keeps the error; the next collection of garbage ends the threads.
    """
    gate, met, deliver = threading.Event(), [], Epoch.deliver

    def deliver_and_hold(epoch, result):
        deliver(epoch, result)
        assert gate.wait(PATIENCE_SECONDS), "nobody opened the gate"

    def collected(phase, info):
        if phase == "stop" and info["generation"] == 2:
            met.append(pool() is not None)
            gate.set()

    def train():
        batches = iter(ThreadLoader(FailingData(200, 0, Bad(1, "first")), num_workers=1))
        with pytest.raises(Bad, match="first") as caught:
            next(batches)
        assert caught.traceback
        return weakref.ref(crew_of(batches))

    monkeypatch.setattr(Epoch, "deliver", deliver_and_hold)
    pool = train()
    gc.callbacks.append(collected)
    try:
        assert_threads_end()
    finally:
        gc.callbacks.remove(collected)
    assert met[0]
    assert pool() is None


def test_threads_end_when_the_dataset_raised_and_a_worker_found_nothing_left():
    """A worker that came too late for a batch does not keep that batch's error: the error knows
    the loop's frames, and these the iterator.
    """

    class Data(Dataset):
        """Sample 1 keeps one of two workers, so that the other gets batch 1 twice; 2 is bad."""

        def __init__(self):
            # Nothing is measured before all batches are given out, so all are shared.
            self.gates = [threading.Event(), threading.Event()]

        def __len__(self):
            return 4

        def __getitem__(self, index):
            if index < 2:
                assert self.gates[index].wait(PATIENCE_SECONDS), "nobody opened the gate"
            if index == 2:
                raise Bad(2, "shared")
            return index

    def train(data):
        batches = iter(ThreadLoader(data, num_workers=2, batch_size=2, in_order=False))
        jobs = shift_of(batches).jobs[0]
        data.gates[0].set()
        with pytest.raises(Bad, match="shared"):
            next(batches)
        until(lambda: not len(jobs))
        data.gates[1].set()
        assert next(batches).tolist() == [0, 1]

    train(Data())
    assert_threads_end()


@pytest.mark.parametrize("options", [{}, {"isolation": "thread"}, {"isolation": "process"}])
def test_dataset_that_refers_to_its_iterator_does_not_keep_it(options):
    """When the epoch is over nothing else refers to either."""

    class Holder(Dataset):
        """Has its own batches."""

        def __len__(self):
            return 3

        def __getitem__(self, index):
            return index

    dataset = Holder()
    dataset.batches = iter(DataLoader(dataset, num_workers=1, **options))
    assert torch.cat(list(dataset.batches)).tolist() == [0, 1, 2]
    gone = weakref.ref(dataset)
    del dataset
    gc.collect()
    assert gone() is None


def test_threads_end_when_iterator_is_dropped_unused():
    """iter() alone has started the workers; dropping it ends them."""
    threads_of = [loader_threads() for _ in [iter(ThreadLoader(range(9), num_workers=2))]]
    assert len(threads_of[0]) >= 2
    assert_threads_end(threads_of[0])


def test_delivered_batch_is_not_kept_by_the_loader():
    """The loop's last reference frees a batch while the epoch goes on."""

    class Payload:
        """Something that can be weakly referenced."""

    loader = ThreadLoader(range(8), num_workers=2, collate_fn=lambda samples: Payload())
    batches = iter(loader)
    for _ in range(3):
        freed = threading.Event()
        weakref.finalize(next(batches), freed.set)
        assert freed.wait(PATIENCE_SECONDS), "the loader keeps a batch it has delivered"


def test_many_broken_epochs_leave_threads_and_files_flat():
    """100 loaders that are left in the middle cost nothing in the end."""
    process = psutil.Process()

    def rounds(count):
        for _ in range(count):
            for _ in ThreadLoader(data8, num_workers=2, prefetch_factor=1):
                break
        assert_threads_end()
        return threading.active_count(), process.num_threads(), process.num_fds()

    threads, tasks, files = rounds(5)
    threads_after, _, files_after = rounds(100)
    assert threads_after <= threads
    assert files_after <= files
    # An operating system thread may outlive its Python thread by a moment.
    until(lambda: process.num_threads() <= tasks)


IMPORTS = r"""
import os, signal, sys, threading
import torch
from torch.utils.data import Dataset

class Data(Dataset):
    def __len__(self):
        return 1000

    def __getitem__(self, index):
        return index

class Blocked(Data):
    def __getitem__(self, index):
        if index > 0:
            os.write(1, b"blocked\n")
            threading.Event().wait()
        return index
"""


SHORT_PATIENCE = """
from spdl_torch.engine import threads as thread_group
assert thread_group._EXIT_JOIN_SECONDS == 5.0
thread_group._EXIT_JOIN_SECONDS = 0.2  # for a worker that never returns
"""


@pytest.mark.parametrize("options", ["", ", persistent_workers=True, isolation='thread'"])
def test_interpreter_exits_in_the_middle_of_an_epoch(options):
    """Exit code 0 and nothing on stderr, with a worker that never returns."""
    done = run_script(
        IMPORTS
        + SHORT_PATIENCE
        + f"""
loader = DataLoader(Blocked(), num_workers=2{options})
batches = iter(loader)
os.write(1, b"first %d\\n" % next(batches).item())
"""
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "first 0" in done.stdout


def test_ctrl_c_ends_the_program_when_a_worker_blocks():
    """KeyboardInterrupt wakes the waiting trainer at once; the process dies of it."""
    program = (
        IMPORTS
        + SHORT_PATIENCE
        + """
signal.signal(signal.SIGINT, signal.default_int_handler)
for batch in DataLoader(Blocked(), num_workers=1, isolation="thread"):
    pass
"""
    )
    with _warm.start(["-c", script(program)]) as child:
        try:
            assert child.stdout.readline() == "blocked\n"
            child.send_signal(signal.SIGINT)
            _, stderr = child.communicate(timeout=4 * PATIENCE_SECONDS)
        finally:
            child.kill()
    assert stderr.rstrip().endswith("KeyboardInterrupt")
    assert stderr.count("Traceback") == 1
    assert child.returncode == -signal.SIGINT


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_fork_in_the_middle_of_an_epoch_does_not_hang_the_child():
    """The child has no worker threads: its copy of the epoch ends, a new one works, it exits."""
    done = run_script(
        IMPORTS
        + """
import warnings
loader = DataLoader(Data(), num_workers=2, batch_size=100, isolation="thread")
batches = iter(loader)
next(batches)
warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 and later warn of such a fork
child = os.fork()
if child == 0:
    try:
        for _ in batches:
            pass
    except RuntimeError as error:
        print("child:", error)
    assert len(list(loader)) == 10
    del batches
    sys.exit(0)
_, status = os.waitpid(child, 0)
assert len(list(batches)) == 9
print("exit code of the child", os.waitstatus_to_exitcode(status))
"""
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "exit code of the child 0" in done.stdout
