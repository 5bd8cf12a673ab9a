"""``isolation="process"``: what the loop gets is what threads would have given it."""

from __future__ import annotations

import io
import logging
import multiprocessing
import os
import pickle

import numpy as np
import pytest
import torch
from _gates import num_fds
from _isolated import bits, epochs_of, isolated, nothing_left, num_mapped_slabs, served
from _isolation_data import (
    Coded,
    Crashing,
    Environment,
    Failing,
    Holder,
    Images,
    Sized,
    Unreadable,
    as_list,
)
from _lazy_device import backends
from _loader_helpers import ThreadLoader as DataLoader, assert_threads_end
from _readings import shown
from torch.utils.data import Dataset, Subset

__all__ = ["backends", "nothing_left"]

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.skipif(os.name != "posix", reason="counts children and descriptors"),
]


# -- shared memory ---------------------------------------------------------------------------


def test_batches_stay_right_when_the_loop_keeps_all_of_them():
    """A slab is not written again while anything views it; beyond some, batches are copied."""
    loader = isolated(Sized([20_000] * 60), 2)
    kept = list(loader)
    assert [batch[:, 0].tolist() for batch in kept] == [[2.0 * n, 2.0 * n + 1] for n in range(30)]
    assert all((batch == batch[:, :1]).all() for batch in kept)
    assert 0 < num_mapped_slabs() <= 4 + 2 * 8 + 4  # waiting, kept of each child, one a job
    loader = isolated(Sized([20_000] * 60), 2)
    kept, batches = [], iter(loader)
    kept.extend(next(batches) for _ in range(25))
    assert "batches were copied out of shared memory" in shown(loader.report())


def test_slabs_are_used_again_when_the_loop_lets_batches_go():
    """A long epoch needs no more of them than may be under way, in each child, and the two that
    the loop has."""
    most = 0
    for number, batch in enumerate(isolated(Sized([20_000] * 120), 2)):
        most = max(most, num_mapped_slabs() if number % 10 == 0 else 0)
        assert batch[0, 0] == 2 * number
    assert 0 < most <= 2 * 4 + 2


def test_batches_of_any_size_arrive():
    """Growing, shrinking, below what goes through shared memory, and empty."""
    sizes = [0, 1, 100, 50_000, 10, 400_000, 30_000, 1_000_000, 0, 500_000]
    for index, sample in enumerate(isolated(Sized(sizes), None)):
        assert sample.tolist() == [float(index)] * sizes[index]


def test_batch_is_the_loops_own():
    """It may be changed in place, kept in part, and is as large as it says."""
    batches = iter(isolated(Sized([20_000] * 20), 2, num_workers=1))
    first = next(batches)
    first.mul_(2).add_(1)
    part = first[1, :5]
    assert first.untyped_storage().nbytes() == first.nbytes
    del first
    for number, batch in enumerate(batches, 1):
        assert batch[0, 0] == 2 * number
        del batch
    assert part.tolist() == [3.0] * 5


def test_small_tensors_keep_no_slab():
    """Labels that are kept do not keep the images."""
    batches = isolated(Images(12), 4)
    labels = [batch["index"] for batch in batches]
    assert torch.cat(labels).tolist() == list(range(12))
    assert not num_mapped_slabs()


def test_descriptors_and_slabs_are_flat_over_epochs():
    """Nothing is left of a child but the fork server, which is there from the first one on."""
    list(isolated(Images(), 4))
    assert_threads_end()
    before = num_fds()
    for _ in range(3):
        list(isolated(Images(), 4))
        assert_threads_end()
    assert num_fds() == before
    loader = isolated(Images(), 4, persistent_workers=True)
    for _ in range(3):  # whoever is quicker makes more batches, and may need one more slab for them
        list(loader)
    during = num_fds()
    for _ in range(5):
        list(loader)
    assert num_fds() <= during + 2


# -- errors ----------------------------------------------------------------------------------


def test_error_keeps_its_type_its_notes_and_its_cause():
    """And the child's traceback, as a note; then the epoch goes on."""
    batches = iter(isolated(Failing({5: KeyError}), 4))
    assert next(batches)["index"].tolist() == [0, 1, 2, 3]
    with pytest.raises(Coded, match=r"\(5, 'here'\)") as caught:
        next(batches)
    assert caught.value.code == 5
    notes = "\n".join(caught.value.__notes__)
    assert "in the dataset (spdl-worker-" in notes
    assert "sample index 5" in notes
    heading, first, *_ = caught.value.__notes__[-1].splitlines()
    assert heading.startswith("raised in the worker process (pid")
    assert "_isolation_data.py" in first, "none of the loader's own frames"
    assert 'raise Coded(index, "here")' in notes
    assert isinstance(caught.value.__cause__, KeyError)
    assert next(batches)["index"].tolist() == [8, 9, 10, 11]


@pytest.mark.parametrize(
    ("arguments", "path"),
    [
        ((Holder(transform=[int, Holder(fn=lambda x: x)]),), r"dataset\.transform\[1\]\.fn .*<lam"),
        ((Holder(tables={"a": (x for x in ())}),), r"dataset\.tables\['a'\] .*<generator"),
        ((Subset(Holder(file=io.FileIO(os.devnull)), [0]),), r"dataset\.dataset\.file .*FileIO"),
    ],
)
def test_unpicklable_part_is_named(arguments, path):
    """By the way to it, and what to do; no process is left, and none was started."""
    with pytest.raises(pickle.PicklingError, match=rf"{path}.*\"fork\".*neither pickles anything"):
        iter(served(*arguments))
    assert len(list(isolated(*arguments))) == len(*arguments)


def test_unpicklable_function_is_named():
    """collate_fn and worker_init_fn are looked at too."""
    with pytest.raises(pickle.PicklingError, match="but collate_fn cannot be pickled"):
        iter(served(Images(), collate_fn=lambda samples: samples))
    with pytest.raises(pickle.PicklingError, match="but worker_init_fn cannot be pickled"):
        iter(served(Images(), worker_init_fn=lambda number: None))


def test_dataset_that_the_child_cannot_open_is_an_error():
    """With the reason; after it the epoch is over."""
    batches = iter(served(Unreadable()))
    with pytest.raises(RuntimeError, match="could not be set up: ValueError: this file is not"):
        next(batches)
    assert next(batches, None) is None


# -- resume, figures and the rest ------------------------------------------------------------


def test_default_dtype_is_the_trainers():
    """Threads would see it too."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert next(iter(isolated(Images(4), 4)))["image"].dtype == torch.float64
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("make", [isolated, served])
def test_environment_is_the_trainers(monkeypatch, make):
    """As it is now, and not when the fork server was started."""
    for value in ("one", "two"):
        monkeypatch.setenv("SPDL_TORCH_TEST", value)
        assert list(make(Environment(), None, collate_fn=as_list)) == [
            (value, os.environ.get("RANK", "none"))
        ]


@pytest.mark.parametrize("make", [isolated, served])
def test_rank_is_the_trainers(tmp_path, make):
    """Datasets that share themselves out find it: in the process group, which a forked child knows,
    or in the environment."""
    store = f"file://{tmp_path / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        assert next(iter(make(Environment(), None, collate_fn=as_list)))[1] == "0"
    finally:
        torch.distributed.destroy_process_group()


def test_shared_values_of_multiprocessing_pass():
    """As they do to torch's workers: they are pickled while the process is started."""
    context = multiprocessing.get_context("forkserver")
    counter = context.Value("i", 7)
    shared = torch.zeros(3).share_memory_()
    loader = isolated(Holder(counter=counter, shared=shared), 2, multiprocessing_context=context)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]


def test_epoch_that_was_left_does_not_reach_the_next_one():
    """With persistent workers, batches under way are dropped and their slabs are free again."""
    loader = isolated(Images(), 4, seed=2, persistent_workers=True)
    expected = epochs_of(DataLoader(Images(), 4, num_workers=1, seed=2), 12)
    for epoch, batches in enumerate(expected[:-1]):
        found = iter(loader)
        num_taken = epoch % 6
        assert [bits(next(found)) for _ in range(num_taken)] == batches[:num_taken]
    assert [bits(batch) for batch in loader] == expected[-1]
    assert num_mapped_slabs() <= 4 * 4  # under way in two epochs, on both sides


def test_log_of_the_child_is_the_trainers(caplog):
    """Records of our loggers in the child reach the trainer's handlers."""
    list(isolated(Logging(), 2))
    assert {"sample 0", "sample 1"} == {record.message for record in caplog.records}


class Logging(Dataset):
    """Says which sample it makes."""

    def __len__(self):
        return 2

    def __getitem__(self, index):
        logging.getLogger("spdl_torch.data").warning("sample %d", index)
        return index


def test_device_stage_moves_what_has_arrived(backends):
    """In the trainer: same batches, errors in their places, epoch after epoch; then death."""
    options = {"seed": 4, "device": "cuda", "persistent_workers": True}
    loader = isolated(Failing({5: Coded}), 4, **options)
    for _ in range(2):
        batches = iter(loader)
        assert next(batches)["index"].tolist() == [0, 1, 2, 3]
        with pytest.raises(Coded, match="5"):
            next(batches)
        assert next(batches)["index"].tolist() == [8, 9, 10, 11]
        assert next(batches, None) is None
    assert [stage.name for stage in loader.snapshot().stages] == ["fetch", "collate", "transfer"]
    found = epochs_of(isolated(Images(), 4, **options))
    assert found == epochs_of(DataLoader(Images(), 4, num_workers=2, seed=4))
    batches = iter(isolated(Crashing("exit"), 1, num_workers=1, device="cuda"))
    with pytest.raises(RuntimeError, match="ended by itself with exit code 3"):
        list(batches)


def test_arrays_and_numbers_come_as_they_are():
    """From numpy and Python, nested; writeable arrays stay writeable."""
    sample = {"a": (np.arange(30_000.0), [np.float32(1)]), "b": {"c": "text", "d": None}}
    loader = isolated([sample] * 3, None, collate_fn=as_list)
    for found in loader:
        assert np.array_equal(found["a"][0], sample["a"][0])
        assert found["a"][0].flags.writeable
        assert found["b"] == sample["b"]
        assert type(found["a"][1][0]) is np.float32
