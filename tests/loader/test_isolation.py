"""``isolation="process"``: what the loop gets is what threads would have given it."""

import io
import logging
import multiprocessing
import os
import pickle

import pytest
import torch
from _datasets import Made
from _gates import PATIENCE_SECONDS, num_fds, until
from _inside import num_ready
from _isolated import bits, epochs_of, isolated, nothing_left, num_mapped_slabs, served
from _isolation_data import (
    Coded,
    Crashing,
    Holder,
    Images,
    Unreadable,
    as_list,
    settings,
)
from _lazy_device import backends
from _loader_helpers import assert_threads_end
from _readings import shown
from torch.utils.data import Subset

from spdl_torch import DataLoader

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


# -- shared memory ---------------------------------------------------------------------------


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


# -- errors ----------------------------------------------------------------------------------


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


# -- what the child finds --------------------------------------------------------------------


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
