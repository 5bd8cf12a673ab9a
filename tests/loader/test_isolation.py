"""``isolation="process"``: what the loop gets is what threads would have given it."""

import io
import logging
import multiprocessing
import os
import pickle
import signal
import threading

import numpy as np
import pytest
import torch
import torch.utils.data
from _datasets import Made
from _gates import PATIENCE_SECONDS, num_fds, until
from _inside import num_ready
from _isolated import bits, epochs_of, isolated, nothing_left, num_mapped_slabs, served
from _isolation_data import (
    Coded,
    Contents,
    Crashing,
    Holder,
    Images,
    Layouts,
    Unreadable,
    as_list,
    settings,
)
from _lazy_device import backends
from _loader_helpers import assert_threads_end, torch_loader
from _readings import shown
from torch.utils.data import Dataset, Subset, get_worker_info
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from spdl_torch import DataLoader
from spdl_torch.errors import UnsupportedOptionError
from spdl_torch.loader import opening

__all__ = ["backends", "nothing_left"]

pytestmark = pytest.mark.skipif(os.name != "posix", reason="counts children and descriptors")


def large(length):
    """Samples for shared memory, in which each number is the sample's."""
    return Made(lambda index: torch.full((20_000,), float(index)), length)


def image_or_error(index):
    """Sample 5 fails, and says why."""
    if index == 5:
        raise Coded(index, "here") from KeyError("key 5")
    return Images()[index]


def test_batches_stay_right_when_the_loop_keeps_all_of_them():
    """A slab is not written again while anything views it; beyond some, batches are copied."""
    loader = isolated(large(60), 2)
    kept, batches = [], iter(loader)
    kept.extend(next(batches) for _ in range(25))
    assert "batches were copied out of shared memory" in shown(loader.report())
    kept.extend(batches)
    assert [batch[:, 0].tolist() for batch in kept] == [[2.0 * n, 2.0 * n + 1] for n in range(30)]
    assert all((batch == batch[:, :1]).all() for batch in kept)
    assert 0 < num_mapped_slabs() <= 4 + 2 * 8 + 4  # waiting, kept of each child, one a job


def test_slabs_are_used_again_when_the_loop_lets_batches_go():
    """A long epoch needs no more of them than may be under way, in each child, and the two that
    the loop has."""
    most = 0
    for number, batch in enumerate(isolated(large(120), 2)):
        most = max(most, num_mapped_slabs() if number % 10 == 0 else 0)
        assert batch[0, 0] == 2 * number
    assert 0 < most <= 2 * 4 + 2


def test_batch_is_the_loops_own():
    """It may be changed in place, kept in part, and is as large as it says. Labels that are kept do
    not keep the images."""
    batches = iter(isolated(large(20), 2, num_workers=1))
    first = next(batches)
    first.mul_(2).add_(1)
    part = first[1, :5]
    assert first.untyped_storage().nbytes() == first.nbytes
    del first
    for number, batch in enumerate(batches, 1):
        assert batch[0, 0] == 2 * number
    assert part.tolist() == [3.0] * 5
    del part, batch
    labels = [batch["index"] for batch in isolated(Images(12), 4)]
    assert torch.cat(labels).tolist() == list(range(12))
    assert not num_mapped_slabs()


def test_descriptors_and_slabs_are_flat_over_epochs():
    """Nothing is left of the children; persistent ones need no more with each epoch."""
    list(isolated(Images(), 4))
    assert_threads_end()
    before = num_fds()
    for _ in range(2):
        list(isolated(Images(), 4))
        assert_threads_end()
    assert num_fds() == before
    loader = isolated(Images(), 4, persistent_workers=True)
    list(loader)
    without_slabs = num_fds() - num_mapped_slabs()
    for _ in range(20):
        list(loader)
    assert num_fds() - num_mapped_slabs() == without_slabs
    assert num_mapped_slabs() <= 2 * (4 + 2)  # of each child that once made all that is under way
    batches = iter(loader)
    next(batches)
    loader.close()  # though the iterator is kept
    assert not num_mapped_slabs()
    del batches


def test_closed_loader_frees_what_its_thread_has_unpacked(monkeypatch):
    """Where batches take long to be unpacked, a thread does so, ahead of the loop."""
    monkeypatch.setattr("spdl_torch.loader.backends.processes.hearing._MOST_UNPACKING_NS", 0)
    loader = isolated(Images(), 4, persistent_workers=True)
    for _ in range(3):
        list(loader)
    batches = iter(loader)
    next(batches)
    until(lambda: num_ready(batches))
    loader.close()  # though the iterator is kept
    assert not num_mapped_slabs()


def test_epoch_that_was_left_does_not_reach_the_next_one():
    """With persistent workers, batches under way are dropped and their slabs are free again."""
    loader = isolated(Images(), 4, seed=2, persistent_workers=True)
    expected = epochs_of(DataLoader(Images(), 4, num_workers=1, seed=2, isolation="thread"), 7)
    for num_taken, batches in enumerate(expected[:-1]):
        found = iter(loader)
        assert [bits(next(found)) for _ in range(num_taken)] == batches[:num_taken]
    assert [bits(batch) for batch in loader] == expected[-1]
    assert num_mapped_slabs() <= 4 * 4  # under way in two epochs, on both sides


def test_batch_that_comes_in_the_next_epoch_gives_its_slab_back():
    """It was under way when its own was left."""
    turns = multiprocessing.get_context("fork").Semaphore(0)

    def sample(index):
        """The first needs not wait for its turn."""
        assert index == 0 or turns.acquire(timeout=PATIENCE_SECONDS)
        return torch.zeros(20_000)

    loader = isolated(Made(sample, 3), None, num_workers=1, persistent_workers=True)
    for _ in range(12):
        batches = iter(loader)
        turns.release()  # for what the epoch before has begun
        next(batches)
    turns.release()
    assert num_mapped_slabs() <= 4


def test_device_stage_moves_what_has_arrived(backends):
    """In the trainer: same batches, errors in their places, epoch after epoch; then death."""
    options = {"seed": 4, "device": "cuda", "persistent_workers": True}
    loader = isolated(Made(image_or_error, 12), 4, **options)
    for _ in range(2):
        batches = iter(loader)
        assert next(batches)["index"].tolist() == [0, 1, 2, 3]
        with pytest.raises(Coded, match="5"):
            next(batches)
        assert next(batches)["index"].tolist() == [8, 9, 10, 11]
        assert next(batches, None) is None
    assert [stage.name for stage in loader.snapshot().stages] == ["fetch", "collate", "transfer"]
    found = epochs_of(isolated(Images(), 4, **options))
    assert found == epochs_of(DataLoader(Images(), 4, seed=4))
    batches = iter(isolated(Crashing("exit"), 1, num_workers=1, device="cuda"))
    with pytest.raises(RuntimeError, match="ended by itself with exit code 3"):
        list(batches)


def test_error_keeps_its_type_its_notes_and_its_cause():
    """And the child's traceback, as a note; then the epoch goes on."""
    batches = iter(isolated(Made(image_or_error, 12), 4))
    assert next(batches)["index"].tolist() == [0, 1, 2, 3]
    with pytest.raises(Coded, match=r"\(5, 'here'\)") as caught:
        next(batches)
    assert caught.value.code == 5
    notes = "\n".join(caught.value.__notes__)
    assert "in the dataset (spdl-worker-" in notes
    assert "sample index 5" in notes
    heading, first, *_ = caught.value.__notes__[-1].splitlines()
    assert heading.startswith("raised in the worker process (pid")
    assert "_datasets.py" in first, "none of the loader's own frames"
    assert 'raise Coded(index, "here")' in notes
    assert isinstance(caught.value.__cause__, KeyError)
    assert next(batches)["index"].tolist() == [8, 9, 10, 11]


@pytest.mark.parametrize(
    ("dataset", "path"),
    [
        (Holder(transform=[int, Holder(fn=lambda x: x)]), r"dataset\.transform\[1\]\.fn .*<lam"),
        (Holder(tables={"a": (x for x in ())}), r"dataset\.tables\['a'\] .*<generator"),
        (Subset(Holder(file=io.FileIO(os.devnull)), [0]), r"dataset\.dataset\.file .*FileIO"),
    ],
)
def test_unpicklable_part_is_named(dataset, path):
    """By the way to it, and what to do; no process is left, and none was started. A forked one
    needs no pickle."""
    with pytest.raises(pickle.PicklingError, match=rf"{path}.*\"fork\".*neither pickles anything"):
        iter(served(dataset))
    assert len(list(isolated(dataset))) == len(dataset)


@pytest.mark.parametrize("name", ["collate_fn", "worker_init_fn"])
def test_unpicklable_function_is_named(name):
    """It is looked at, too."""
    with pytest.raises(pickle.PicklingError, match=f"but {name} cannot be pickled"):
        iter(served(Images(), **{name: lambda _: None}))


def test_dataset_that_the_child_cannot_open_is_an_error():
    """With the reason; after it the epoch is over."""
    batches = iter(served(Unreadable()))
    with pytest.raises(RuntimeError, match="could not be set up: ValueError: this file is not"):
        next(batches)
    assert next(batches, None) is None


@pytest.mark.parametrize("make", [isolated, served])
def test_settings_are_the_trainers(monkeypatch, tmp_path, make):
    """As they are now, and not when a fork server was started. Datasets that share themselves out
    find the rank in the process group, which a forked child knows, or in the environment."""
    monkeypatch.setenv("SPDL_TORCH_TEST", "one")
    monkeypatch.delenv("RANK", raising=False)
    assert list(make(Made(settings, 1), None, num_workers=1, collate_fn=as_list)) == [
        ("one", None, torch.float32)
    ]
    monkeypatch.setenv("SPDL_TORCH_TEST", "two")
    store = f"file://{tmp_path / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    torch.set_default_dtype(torch.float64)
    try:
        assert list(make(Made(settings, 1), None, num_workers=1, collate_fn=as_list)) == [
            ("two", 0, torch.float64)
        ]
    finally:
        torch.set_default_dtype(torch.float32)
        torch.distributed.destroy_process_group()


def test_shared_values_of_multiprocessing_pass():
    """As they do to torch's workers: they are pickled while the process is started."""
    context = multiprocessing.get_context("forkserver")
    counter = context.Value("i", 7)
    shared = torch.zeros(3).share_memory_()
    loader = isolated(Holder(counter=counter, shared=shared), 2, multiprocessing_context=context)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]


def test_log_of_the_child_is_the_trainers(caplog):
    """Records of our loggers in the child reach the trainer's handlers."""
    log = logging.getLogger("spdl_torch.data").warning
    list(isolated(Made(lambda index: log("sample %d", index), 2), 2, collate_fn=as_list))
    assert {"sample 0", "sample 1"} == {record.message for record in caplog.records}


def test_torchs_own_processes_load_where_there_are_none_of_ours(monkeypatch, caplog):
    """As on Windows: the batches, and one line in the log that says what is missing."""
    monkeypatch.setattr(opening, "has_processes", False)
    opening._say_whose_processes.cache_clear()
    loader = isolated(list(range(10)), 4, persistent_workers=True)
    for _ in range(2):
        batches = iter(loader)
        assert type(batches) is _MultiProcessingDataLoaderIter
        assert [batch.tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    loader.close()
    (line,) = [each for each in caplog.messages if "Windows" in each]
    assert "without states within an epoch, statistics of the workers" in line


def test_what_torchs_own_processes_cannot_is_refused(monkeypatch):
    """At ``iter()``, and not in silence; threads and no workers are as everywhere."""
    monkeypatch.setattr(opening, "has_processes", False)
    resumed = isolated(list(range(4)), num_workers=1)
    resumed.load_state_dict(resumed.state_dict())
    with pytest.raises(UnsupportedOptionError, match="a state that was loaded has no effect"):
        iter(resumed)
    with pytest.raises(UnsupportedOptionError, match='on_error="skip" has no effect on Windows'):
        iter(isolated(list(range(4)), num_workers=1, on_error="skip"))
    for options in ({"num_workers": 0}, {"num_workers": 1, "isolation": "thread"}):
        assert len(list(DataLoader(list(range(4)), on_error="skip", **options))) == 4


class Introspective(Dataset):
    """What a worker can find out about itself, on its own thread and on one that it starts."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        before = signal.signal(signal.SIGALRM, signal.SIG_IGN)  # only a main thread may
        signal.signal(signal.SIGALRM, before)
        found = []
        thread = threading.Thread(target=lambda: found.append(self.about()))
        thread.start()
        thread.join()
        is_main = threading.current_thread() is threading.main_thread()
        return is_main, os.getppid(), self.about(), *found

    def about(self):
        info = get_worker_info()
        return info.id, info.num_workers, info.seed, info.dataset is self


def test_worker_finds_what_torchs_worker_finds():
    """It is the main thread of a child of the trainer, with torch's worker info and seed; so it is
    for a thread that the dataset starts."""
    found = []
    for make, options in ((DataLoader, {"rng": "worker"}), (torch_loader, {})):
        generator = torch.Generator().manual_seed(4)
        loader = make(
            Introspective(), num_workers=2, generator=generator, collate_fn=as_list, **options
        )
        found.append([sample for batch in loader for sample in batch])
    ours, theirs = found
    assert ours == theirs
    assert {sample[:2] for sample in ours} == {(True, os.getpid())}


LARGE = 100_000  # indices, about 0.5 MB; the pipe takes 0.2 MB


class Texts(Dataset):
    """Batches as large as their jobs, and pickled: their texts do not go through shared memory."""

    def __getitems__(self, indices):
        return [str(index) for index in indices]


def test_large_jobs_and_large_results_do_not_block_each_other():
    """The trainer writes jobs while the workers write results, each more than a pipe takes."""
    batches = [list(range(10**6 + n, 10**6 + n + LARGE // 4)) for n in range(10)]
    loader = DataLoader(
        Texts(), batch_sampler=batches, num_workers=2, prefetch_factor=3, collate_fn=list
    )
    for number, batch in enumerate(loader):
        assert batch == [str(index) for index in batches[number]]
    assert number == 9


def targets(index):
    """As for detection: many small tensors."""
    return [torch.full((4,), float(index + n)) for n in range(20)]


@pytest.mark.parametrize("persistent", [False, True])
def test_batches_that_take_long_to_unpack_are_received_by_a_thread(persistent):
    """From the second epoch on, so that a loop that waits for its device need not do it."""
    loader = isolated(Made(targets, 240), 30, collate_fn=as_list, persistent_workers=persistent)
    found, has_thread = [], []
    for _ in range(3):
        epoch = []
        for batch in loader:
            epoch.append(bits(batch))
            has_thread.append("spdl-receive" in {each.name for each in threading.enumerate()})
        found.append(epoch)
    expected = list(map(bits, DataLoader(Made(targets, 240), 30, collate_fn=as_list)))
    assert found == [expected] * 3
    assert has_thread == [False] * 8 + [True] * 16


MIB = 1 << 20


def loader_of(dataset, kind=DataLoader, **options):
    options = {"num_workers": 2, "collate_fn": as_list, **options}
    return kind(dataset, multiprocessing_context="forkserver", **options)


class Tagged(np.ndarray):
    """A subclass, which pickle handles by itself."""


def contents(folder):
    """Large and small arrays and tensors of every form, and some that are one."""
    array = np.arange(MIB // 2, dtype=np.float32).reshape(512, 1024)
    tensor = torch.arange(MIB // 2).reshape(1024, 512)
    read_only, small_read_only = array.copy(), array[0, :8].copy()
    read_only.flags.writeable = small_read_only.flags.writeable = False
    dates = np.zeros(MIB, dtype="datetime64[s]")
    records = np.zeros(MIB, dtype=[("a", "i4"), ("b", "f8")])
    memory_map = np.memmap(folder / "map", np.uint8, "w+", shape=2 * MIB)
    memory_map[-3:] = 7
    return {
        "array": array,
        "array_again": array,
        "view": array[1:],
        "fortran": np.asfortranarray(array),
        "strided": array[:, ::2],
        "reversed": array[::-1],
        "read_only": read_only,
        "small_read_only": small_read_only,
        "dates": dates,
        "records": records,
        "tagged": array.view(Tagged),
        "memory_map": memory_map,
        "tensor": tensor,
        "tensor_again": tensor,
        "tensor_view": tensor[1:],
        "transposed": tensor.t(),
        "expanded": torch.ones(1, 1024).expand(1024, 1024),
        "half": torch.ones(MIB, dtype=torch.bfloat16),
        "of_array": torch.from_numpy(array.copy()),
        "small": torch.arange(4),
    }


def test_contents_are_those_of_torchs_workers(tmp_path):
    """Types, forms, values, whether they can be written, and which are one."""
    dataset = Contents(**contents(tmp_path))
    ours = list(loader_of(dataset, num_workers=1))
    theirs = list(loader_of(dataset, torch.utils.data.DataLoader, num_workers=1))
    for mine, expected in zip(ours[0][0], theirs[0][0], strict=True):
        assert mine == expected


@pytest.mark.filterwarnings("ignore:Sparse CS. tensor support", "ignore:Sparse invariant checks")
def test_sparse_tensors_are_those_of_torchs_workers():
    """Of every layout, small and large."""
    dense = torch.arange(36.0).reshape(6, 6)
    dataset = Layouts(
        coo=dense.to_sparse(),
        coo_of_nothing=torch.zeros(3).to_sparse(),
        not_coalesced=torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (3,)),
        large=torch.ones(MIB // 8).to_sparse(),
        csr=dense.to_sparse_csr(),
        csc=dense.to_sparse_csc(),
        bsr=dense.to_sparse_bsr((2, 3)),
        bsc=dense.to_sparse_bsc((2, 3)),
        strided=dense,
    )
    (expected,) = loader_of(dataset, torch.utils.data.DataLoader, num_workers=1)
    (found,) = loader_of(dataset, num_workers=1)
    assert found == expected == [dataset[0]]
