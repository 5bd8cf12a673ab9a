"""Epochs after a resumed one, of a dataset that applies the state it was given again and again."""

import multiprocessing
import warnings

import pytest
from _loader_helpers import DataLoader, library
from torch.utils.data import IterableDataset, get_worker_info

NUM_ITEMS = 16

SEATS = {
    "without workers": {},
    "threads": {"num_workers": 2, "persistent_workers": True, "isolation": "thread"},
    "processes": {"num_workers": 2, "persistent_workers": True, "isolation": "process"},
}


class Reapplies(IterableDataset):
    """Begins at the state that it was given until another epoch is named, as Hugging Face's."""

    def __init__(self):
        self.epoch = self.position = 0
        self.begins_at = None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        info = get_worker_info()
        count = 1 if info is None else info.num_workers
        self.position = 0
        if self.begins_at is not None and self.begins_at["epoch"] == self.epoch:
            self.position = self.begins_at["position"]
        while self.position < NUM_ITEMS // count:
            self.position += 1
            yield self.position - 1

    def state_dict(self):
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state):
        self.begins_at = state


class GoesOn(Reapplies):
    """Begins at the state once; each epoch has as many items."""

    def __iter__(self):
        yield from super().__iter__()
        self.begins_at = None


def resumed(kind, seat, batch_size=2):
    """A loader that resumes an epoch in its middle."""
    loaders = [DataLoader(kind(), batch_size=batch_size, **SEATS[seat]) for _ in range(2)]
    first, again = loaders
    first.state_dict()
    batches = iter(first)
    for _ in range(4):
        next(batches)
    again.load_state_dict(first.state_dict())
    del batches
    first.close()
    return again


def hugging_face():
    """A stream of the library's own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        datasets, table = library("datasets"), library("datasets.table")
    numbers = table.InMemoryTable.from_pydict({"x": list(range(NUM_ITEMS))})
    rows = datasets.Dataset(numbers, fingerprint="rows")  # else it pickles pyarrow's types
    return rows.to_iterable_dataset(num_shards=4)


OF_THE_LIBRARY = [
    pytest.mark.filterwarnings("ignore"),  # in this and in later versions
    pytest.mark.skipif(
        "fork" not in multiprocessing.get_all_start_methods(), reason="workers are forked"
    ),
]


@pytest.mark.parametrize(
    ("kind", "seat"),
    [
        *((Reapplies, seat) for seat in SEATS),
        pytest.param(hugging_face, "without workers", marks=OF_THE_LIBRARY),
    ],
)
def test_first_short_epoch_is_warned_of(kind, seat):
    """Once, with what to do."""
    loader = resumed(kind, seat)
    assert len(list(loader)) == 4
    with pytest.warns(UserWarning, match=r" has 8 items, just as .*set_epoch\(number\)"):
        assert len(list(loader)) == 4
    assert len(list(loader)) == 4
    loader.close()


@pytest.mark.parametrize("seat", SEATS)
def test_whole_epochs_are_not_warned_of(seat):
    """Of a dataset whose state is over with its epoch."""
    loader = resumed(GoesOn, seat)
    assert [len(list(loader)) for _ in range(3)] == [4, 8, 8]
    loader.close()


@pytest.mark.parametrize("kind", [Reapplies, pytest.param(hugging_face, marks=OF_THE_LIBRARY)])
def test_named_epochs_are_whole(kind):
    """As the warning says."""
    loader = resumed(kind, "without workers")
    lengths = []
    for epoch in range(3):
        loader.dataset.set_epoch(epoch)
        lengths.append(len(list(loader)))
    assert lengths == [4, 8, 8]
