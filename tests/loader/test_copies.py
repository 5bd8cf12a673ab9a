"""Copies of users' objects never run the user's ``__del__``: what they share stays open."""

import copy
import gc
import os
import pickle
import threading
from collections import Counter

import pytest
from _seats import NUM_WORKERS, in_every_seat
from torch.utils.data import Dataset

from spdl_torch import DataLoader
from spdl_torch.objects.copies import deep_copy, shallow_copy
from spdl_torch.testing import assert_reproducible, assert_thread_safe

both_copies = pytest.mark.parametrize("copied", [shallow_copy, deep_copy])


class Ends:
    """Writes into a file when it ends, in whatever process that is."""

    def __init__(self, log, name):
        self.log, self.name = log, name

    def __del__(self):
        with open(self.log, "a") as file:
            file.write(f"{self.name} {os.getpid()}\n")


class Crop(Ends):
    """A transform that ends itself."""

    def __call__(self, value):
        return value


class Unpacked(Ends, Dataset):
    """Ends itself, and holds what ends itself: alone, in a list, in a transform."""

    def __init__(self, log):
        super().__init__(log, "dataset")
        self.held = Ends(log, "held")
        self.listed = [Ends(log, "listed")]
        self.transform = Crop(log, "transform")

    def __len__(self):
        return 8

    def __getitem__(self, index):
        assert type(self) is Unpacked
        return self.transform(index)


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
    names = "dataset", "held", "listed", "transform"
    dataset = Unpacked(log)
    loader = seat.loader(dataset, batch_size=2)
    for _ in range(2):
        assert len(list(loader)) == 4
    assert [line for line in ended(log) if not seat.pickles or line.endswith(here)] == []
    del loader, dataset
    lines = ended(log)
    assert [line for line in lines if line.endswith(here)] == [name + here for name in names]
    in_workers = Counter(line.split()[0] for line in lines if not line.endswith(here))
    assert len(set(lines)) == len(lines)
    assert set(in_workers.values()) <= {2 * NUM_WORKERS}  # two epochs
    assert in_workers.keys() == (set(names) if seat.pickles else set())


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
    assert len(ended(log)) == 4


count = []


@pytest.fixture(autouse=True)
def _count_anew():
    count.clear()


class Counted:
    def __del__(self):
        count.append(type(self).__name__)


class Slotted:
    __slots__ = ("__weakref__", "x")
    __del__ = Counted.__del__


class Listed(list, Counted):
    pass


class Keyed(dict, Counted):
    pass


class Stated(Counted):
    """Is told of its subclasses, and makes its state itself."""

    def __init_subclass__(cls):
        raise AssertionError("nobody made one")

    def __getstate__(self):
        return vars(self)

    def __setstate__(self, state):
        vars(self).update(state)


def made(kind):
    value = kind()
    value.x = [1]
    return value


def ended_after_collection():
    gc.collect()
    return count


@pytest.mark.parametrize("kind", [Counted, Slotted, Listed, Keyed, Stated])
@pytest.mark.parametrize("keeps_original", [False, True])
@both_copies
def test_a_copy_ends_silently_and_is_of_its_class(copied, kind, keeps_original):
    """Its type, state and pickle are those of any copy; nothing is told of a class."""
    original = made(kind)
    if kind in (Listed, Keyed):
        original.__init__([(1, 2)])
    own = copied(original)
    plain = (copy.copy if copied is shallow_copy else copy.deepcopy)(original)
    assert type(own) is kind
    assert (own.x is original.x) == (plain.x is original.x)
    assert own.x == [1]
    if kind is not Slotted:
        assert pickle.dumps(own) == pickle.dumps(plain)
    del plain
    assert ended_after_collection() == [kind.__name__], "the plain copy runs it: the control"
    if not keeps_original:
        del own
        assert ended_after_collection() == [kind.__name__]
    del original  # what a copy uses is not ended, though nobody else has it
    assert ended_after_collection() == [kind.__name__] * (1 if keeps_original else 2)
    own = None
    assert ended_after_collection() == [kind.__name__] * 2


def test_a_copy_that_fails_ends_silently():
    """Half of it has no attributes yet, at which __del__ would fail; the memo forgets it."""
    unfinished = made(Counted)
    unfinished.lock = threading.Lock()
    values, memo = [made(Counted), unfinished], {}
    with pytest.raises(TypeError, match="pickle"):
        deep_copy(values, memo)
    assert ended_after_collection() == []
    assert memo == {}


class Reopens(Counted):
    """Makes its copies itself, each with a resource of its own."""

    def __copy__(self):
        return Reopens()

    def __deepcopy__(self, memo):
        return Reopens()


@both_copies
def test_a_copy_made_by_its_class_ends_as_any_object(copied):
    """It may have opened a file of its own, which nobody else would close."""
    original = Reopens()
    copied(original)
    assert ended_after_collection() == ["Reopens"]
    assert original
