"""What has a ``__del__`` is not copied: what it has opened stays open."""

import gc
import os
import threading
from collections import Counter

import pytest
from _seats import NUM_WORKERS, in_every_seat
from torch.utils.data import Dataset

from spdl_torch import DataLoader
from spdl_torch.objects.copies import deep_copy, shallow_copy
from spdl_torch.testing import assert_reproducible, assert_thread_safe


class Ends:
    """Writes into a file when it ends, in whatever process that is."""

    def __init__(self, log, name):
        self.log, self.name = log, name

    def __del__(self):
        with open(self.log, "a") as file:
            file.write(f"{self.name} {os.getpid()}\n")


class Crop:
    """A transform that holds what ends itself."""

    def __init__(self, log):
        self.parts = [Ends(log, "part")]

    def __call__(self, value):
        return value


class Unpacked(Ends, Dataset):
    """Ends itself, and holds what ends itself: alone, in a list, in a transform."""

    def __init__(self, log):
        super().__init__(log, "dataset")
        self.held = Ends(log, "held")
        self.listed = [Ends(log, "listed")]
        self.transform = Crop(log)

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return self.transform(index)


NAMES = sorted(["dataset", "held", "listed", "part"])


def ended(log):
    """What has ended, by name and process."""
    gc.collect()
    return sorted(log.read_text().split("\n")[:-1]) if log.exists() else []


@in_every_seat
def test_what_a_dataset_holds_ends_once_and_after_the_loader(seat, tmp_path):
    """Copies on threads and in forks come and go with the epochs; only the trainer's own objects
    run __del__. Workers that were given a pickle end what they made of it, as torch's do.
    """
    log, here = tmp_path / "log", f" {os.getpid()}"
    dataset = Unpacked(log)
    loader = seat.loader(dataset, batch_size=2)
    for _ in range(2):
        assert len(list(loader)) == 4
    assert [line for line in ended(log) if not seat.pickles or line.endswith(here)] == []
    del loader, dataset
    lines = ended(log)
    assert [line for line in lines if line.endswith(here)] == [name + here for name in NAMES]
    in_workers = Counter(line.split()[0] for line in lines if not line.endswith(here))
    assert len(set(lines)) == len(lines)
    assert set(in_workers.values()) <= {2 * NUM_WORKERS}  # two epochs
    assert in_workers.keys() == (set(NAMES) if seat.pickles else set())


def check_reproducible(dataset):
    """As a user does."""
    assert_reproducible(lambda number: DataLoader(dataset, num_workers=number, isolation="thread"))


@pytest.mark.parametrize("check", [assert_thread_safe, check_reproducible])
def test_a_check_ends_nothing_of_the_dataset(check, tmp_path):
    """The checks of ``spdl_torch.testing`` make copies too."""
    log = tmp_path / "log"
    check(dataset := Unpacked(log))
    assert ended(log) == []
    del dataset
    assert len(ended(log)) == len(NAMES)


class Reopens(Ends):
    """Makes its copies itself, each with a resource of its own."""

    def __copy__(self):
        return Reopens(self.log, "copy")

    def __deepcopy__(self, memo):
        return Reopens(self.log, "copy")


@pytest.mark.parametrize("copied", [shallow_copy, deep_copy])
def test_a_copy_made_by_its_class_ends_as_any_object(copied, tmp_path):
    """It may have opened a file of its own, which nobody else closes. Others are not copied."""
    log = tmp_path / "log"
    original = Reopens(log, "original")
    copied(original)
    assert [line.split()[0] for line in ended(log)] == ["copy"]
    one = Ends(log, "one")
    assert copied(one) is one


def test_a_copy_that_fails_leaves_no_half_of_it():
    """The memo forgets it: others may ask for the same object."""
    values, memo = [[], threading.Lock()], {}
    with pytest.raises(TypeError, match="pickle"):
        deep_copy(values, memo)
    assert memo == {}
