"""Copies of users' objects never run the user's ``__del__``: what they share stays open."""

import gc
import os
import threading
from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch
from support.gates import switching
from support.seats import NUM_WORKERS, in_every_seat
from torch.utils.data import Dataset

from spdl_torch import DataLoader
from spdl_torch.data.sources import ListSource
from spdl_torch.objects.copies import deep_copy, shallow_copy
from spdl_torch.testing import assert_thread_safe


class Ends:
    """Writes into a file when it ends, in whatever process that is."""

    def __init__(self, log, name):
        self.log, self.name = log, name

    def __del__(self):
        with open(self.log, "a") as file:
            file.write(f"{self.name} {os.getpid()}\n")


class Slotted:
    __slots__ = ("__weakref__", "log", "name")
    __init__, __del__ = Ends.__init__, Ends.__del__


class Keyed(dict, Ends):
    def __init__(self, log, name):
        super().__init__({name: [name]})
        Ends.__init__(self, log, name)


KINDS = Ends, Slotted, Keyed


class Crop(Ends):
    """A transform that ends itself, and holds what ends itself."""

    def __init__(self, log):
        super().__init__(log, "transform")
        self.parts = [kind(log, kind.__name__) for kind in KINDS]

    def __call__(self, value):
        for kind, part in zip(KINDS, self.parts, strict=True):
            assert type(part) is kind
            assert part.name == kind.__name__
        assert self.parts[2] == {"Keyed": ["Keyed"]}
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
        assert type(self) is Unpacked
        return self.transform(index)


NAMES = sorted(["dataset", "held", "listed", "transform", *(kind.__name__ for kind in KINDS)])


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


def test_check_of_threads_ends_nothing_of_the_dataset(tmp_path):
    """It makes copies, too."""
    assert_thread_safe(dataset := Unpacked(tmp_path / "log"))
    assert ended(tmp_path / "log") == []
    del dataset


class Reopens(Ends):
    """Makes its copies itself, each with a resource of its own."""

    def __copy__(self, memo=None):
        return Reopens(self.log, "copy")

    __deepcopy__ = __copy__


@pytest.mark.parametrize("copied", [shallow_copy, deep_copy])
def test_copy_made_by_its_class_ends_as_any_object(copied, tmp_path):
    """It may have opened a file of its own, which nobody else would close."""
    original = Reopens(tmp_path / "log", "original")
    copied(original)
    assert [line.split()[0] for line in ended(tmp_path / "log")] == ["copy"]


def test_copy_that_fails_ends_silently(tmp_path):
    """Half of it has no attributes yet, at which __del__ would fail; the memo forgets it."""
    values, memo = [Ends(tmp_path / "log", name) for name in ("whole", "unfinished")], {}
    values[1].lock = threading.Lock()
    with pytest.raises(TypeError, match="pickle"):
        deep_copy(values, memo)
    assert ended(tmp_path / "log") == []
    assert memo == {}


OPENED = []


@pytest.fixture
def numbers(tmp_path):
    """A file of numbers; what the copies of a dataset have opened is closed afterwards."""
    path = tmp_path / "numbers"
    np.arange(4000, dtype="<u2").tofile(path)
    yield path
    while OPENED:
        OPENED.pop().close()


class Lazy(Dataset):
    """Opens its file on the first sample, and closes it when it ends."""

    file = None

    def __init__(self, path):
        self.path = path

    def __len__(self):
        return 4000

    def __getitem__(self, index):
        if self.file is None:
            self.file = self.path.open("rb")
            OPENED.append(self.file)
        self.file.seek(2 * index)
        return int.from_bytes(self.file.read(2), "little")

    def __del__(self):
        if self.file is not None:
            self.file.close()


class Chosen(Lazy):
    """Keeps how it reads: its own methods, and one of a dataset inside."""

    def __init__(self, path, keep):
        super().__init__(path)
        self.inner = Lazy(path)
        self.kept = keep(self)

    def read(self, index):
        return super().__getitem__(index)

    def __getitem__(self, index):
        kept = self.kept
        return (kept[0] if isinstance(kept, list) else kept)(index)


KEEP = {
    "method": lambda self: self.read,
    "of one inside": lambda self: partial(self.inner.__getitem__),
    "list": lambda self: [self.read, self.inner.__getitem__],
}


@pytest.mark.parametrize("keep", KEEP)
def test_threads_read_files_of_their_own(keep, numbers):
    """Also where the class has a __del__, by whatever method it keeps: from one position for all
    they would read each other's samples."""
    dataset = Chosen(numbers, KEEP[keep])
    loader = DataLoader(dataset, 50, num_workers=4, isolation="thread")
    with switching():
        assert torch.cat(list(loader)).tolist() == [*range(4000)]
    assert dataset.file is dataset.inner.file is None


def test_a_shard_of_a_source_with_a_del_is_another_source():
    kind = type("Ending", (ListSource,), {"__del__": lambda self: None})
    source = kind([*range(8)])
    assert [list(source.shard(rank, 2)) for rank in (0, 1)] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert list(source) == [*range(8)]
