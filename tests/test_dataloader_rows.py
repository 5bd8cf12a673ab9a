"""Batches that are read at once equal those that torch stacks row by row."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from _loader_helpers import (
    DataLoader,
    frozen,
    no_thread_left,  # noqa: F401
    torch_loader,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from spdl_torch.data.rows import row_reader

LENGTH = 12
TENSORS = {
    "rows": torch.arange(LENGTH * 3.0).reshape(LENGTH, 3),
    "labels": torch.arange(LENGTH),
    "columns of another": torch.arange(LENGTH * 2).reshape(2, LENGTH).T,
    "images, channels last": torch.arange(LENGTH * 24)
    .reshape(LENGTH, 2, 3, 4)
    .to(memory_format=torch.channels_last),
    "one row, repeated": torch.arange(3).expand(LENGTH, 3),
    "truth": torch.arange(LENGTH) % 2 == 0,
    "nothing in a row": torch.empty(LENGTH, 0),
    "complex": torch.arange(LENGTH).to(torch.complex64),
}
numbers = st.integers(-LENGTH, LENGTH - 1)
tensors = st.lists(st.sampled_from(sorted(TENSORS)), min_size=1, max_size=3)


def strides(batch):
    """Of every tensor in it, and the types of what is around them."""
    if isinstance(batch, torch.Tensor):
        return batch.stride()
    if isinstance(batch, dict):
        return {key: strides(each) for key, each in batch.items()}
    return type(batch), [strides(each) for each in batch if not isinstance(each, str)]


def events_of(loader):
    """Batches with their layout, or the error's type and text."""
    batches, events = iter(loader), []
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return events
        except Exception as error:
            events.append((type(error), str(error)))
        else:
            events.append((frozen(batch), type(batch), strides(batch)))


@settings(deadline=None, max_examples=60)
@given(
    names=tensors,
    indices=st.lists(st.lists(numbers, min_size=1, max_size=5), max_size=6),
    subset=st.none() | st.lists(numbers, min_size=LENGTH, max_size=LENGTH),
    num_workers=st.sampled_from([0, 0, 2]),
    rng=st.sampled_from(["sample", "worker"]),
)
def test_batches_equal_torchs(names, indices, subset, num_workers, rng):
    """Values, types and strides, in every order of rows, negative ones too."""
    data = TensorDataset(*(TENSORS[name] for name in names))
    if subset is not None:
        data = Subset(data, subset)
    assert row_reader(data, default_collate) is not None
    ours = DataLoader(data, batch_sampler=indices, num_workers=num_workers, rng=rng)
    assert events_of(ours) == events_of(torch_loader(data, batch_sampler=indices))


@pytest.mark.parametrize(
    "index",
    [[0, LENGTH], [-LENGTH - 1], [True, 2], [torch.tensor(3), 1], [slice(0, 2)], [0.5], []],
    ids=repr,
)
@pytest.mark.parametrize("of", [TensorDataset, Subset])
def test_other_indices_give_what_torch_gives(index, of):
    """Rows that do not exist, and what is no plain number: torch's batch or torch's error."""
    data = TensorDataset(TENSORS["rows"], TENSORS["labels"])
    if of is Subset:
        data = Subset(data, range(LENGTH))
    ours = DataLoader(data, batch_sampler=[[1], index, [2]])
    assert events_of(ours) == events_of(torch_loader(data, batch_sampler=[[1], index, [2]]))


class OneRow(Dataset):
    """One attribute's row."""

    def __init__(self, a, b):
        self.a, self.b = a, b

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        return self.a[index]


class InTuple(OneRow):
    def __getitem__(self, index):
        """With a docstring."""
        return self.a[index], self.b[index]


class OnlyOneInTuple(OneRow):
    def __getitem__(self, i: int) -> tuple[object]:
        return (self.a[i],)


class InList(OneRow):
    def __getitem__(me, n):
        return [me.b[n], me.a[n]]


class InDict(OneRow):
    def __getitem__(self, index):
        return {"features": self.a[index], "label": self.b[index]}


class OneInDict(OneRow):
    def __getitem__(self, index):
        """features"""
        return {"a": self.a[index]}


class NamedFirst(OneRow):
    def __getitem__(self, index):
        """Takes rows, gives them names."""
        x = self.a[index]
        label = self.b[index]
        return x, label


class NamedThenDict(OneRow):
    def __getitem__(self, index):
        x = self.a[index]
        y = self.b[index]
        return {"x": x, "y": y}


class NamedAlone(OneRow):
    def __getitem__(self, index):
        sample = self.a[index]
        return sample


FORMS = [
    OneRow,
    InTuple,
    OnlyOneInTuple,
    InList,
    InDict,
    OneInDict,
    NamedFirst,
    NamedThenDict,
    NamedAlone,
]
COLUMNS = {
    **TENSORS,
    "array": np.arange(LENGTH * 4.0).reshape(LENGTH, 2, 2),
    "array of numbers": np.arange(LENGTH, dtype=np.int16),
    "array of halves": np.arange(LENGTH, dtype=np.float16),
    "array of truth": np.arange(LENGTH) % 3 == 0,
    "array of singles": np.linspace(0, 1, LENGTH, dtype=np.float32),
    "complex array": np.ones((LENGTH, 1), dtype=np.complex64),
    "array that may not be written": np.broadcast_to(np.arange(LENGTH), (LENGTH,)).copy(),
    "columns of an array": np.arange(2 * LENGTH).reshape(2, LENGTH).T,
    "array backwards": np.arange(LENGTH * 2).reshape(LENGTH, 2)[:, ::-1],
    "array of objects": np.array([None] * LENGTH),
    "array of the other byte order": np.arange(LENGTH, dtype=">i4"),
    "array of strings": np.array([str(n) for n in range(LENGTH)]),
    "ints": list(range(LENGTH)),
    "ints too large": [2**63 - 2 + n % 3 for n in range(LENGTH)],
    "floats": tuple(n / 3 for n in range(LENGTH)),
    "strings": [f"name {n}" for n in range(LENGTH)],
    "ints, one None": [n if n != 7 else None for n in range(LENGTH)],
    "ints and floats": [n if n % 2 else n / 2 for n in range(LENGTH)],
    "bools": [n > 3 for n in range(LENGTH)],
    "rows of several lengths": [torch.ones(1 + n // 9) for n in range(LENGTH)],
    "by number": {n: float(n) for n in range(LENGTH)},
    "too short": torch.arange(LENGTH - 2),
    "with gradients": torch.ones(LENGTH, requires_grad=True),
    "a number": torch.tensor(3),
}
COLUMNS["array that may not be written"].setflags(write=False)
PLAIN = ["rows", "labels", "array", "array of numbers", "ints", "floats", "strings"]


@settings(deadline=None, max_examples=300)
@given(
    form=st.sampled_from(FORMS),
    names=st.lists(st.sampled_from(sorted(COLUMNS)), min_size=2, max_size=2),
    indices=st.lists(st.lists(numbers, min_size=1, max_size=5), max_size=6),
    subset=st.none() | st.lists(numbers, min_size=LENGTH, max_size=LENGTH),
    num_workers=st.sampled_from([0, 0, 2]),
)
@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_datasets_that_take_rows_equal_torchs(form, names, indices, subset, num_workers):
    """Values, types, strides and errors, whether or not their columns can be read at once."""
    data = form(*(COLUMNS[name] for name in names))
    if subset is not None:
        data = Subset(data, subset)
    ours = DataLoader(data, batch_sampler=indices, num_workers=num_workers)
    assert events_of(ours) == events_of(torch_loader(data, batch_sampler=indices))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", PLAIN)
def test_their_plain_columns_are_read_at_once(form, name):
    """Every form, and every kind of column that can be."""
    reader = row_reader(form(COLUMNS[name], COLUMNS["labels"]), default_collate)
    assert reader is not None
    assert reader.find([3, 1, -1]) is not None


def test_memory_mapped_arrays_are_read_at_once(tmp_path):
    """As np.load(mmap_mode="r") gives them."""
    np.save(tmp_path / "table.npy", COLUMNS["array"])
    data = OneRow(np.load(tmp_path / "table.npy", mmap_mode="r"), None)
    assert row_reader(data, default_collate).find([1]) is not None
    batches = list(DataLoader(data, batch_size=5, num_workers=2))
    assert torch.equal(torch.cat(batches), torch.from_numpy(COLUMNS["array"]))


def test_columns_may_be_replaced():
    """The dataset's attributes are those of the moment, plain or not."""
    data = OneRow(torch.zeros(LENGTH), None)
    loader = DataLoader(data, batch_size=4)
    batches = iter(loader)
    assert next(batches).tolist() == [0, 0, 0, 0]
    data.a = torch.arange(LENGTH)
    assert next(batches).tolist() == [4, 5, 6, 7]
    data.a = {n: float(n) for n in range(LENGTH)}
    assert next(batches).tolist() == [8, 9, 10, 11]


class Noisy(OneRow):
    def __getitem__(self, index):
        return self.a[index].float() + torch.rand(())


class PicksTwice(OneRow):
    def __getitem__(self, index):
        return self.a[index][0]


class TakesNext(OneRow):
    def __getitem__(self, index):
        return self.a[index + 1]


class TakesOneForAll(OneRow):
    def __getitem__(self, index):
        return self.a[0]


class SometimesElse(OneRow):
    def __getitem__(self, index):
        if index:
            return self.a[index]
        return self.b[index]


class TheSameTwice(OneRow):
    def __getitem__(self, index):
        return self.a[index], self.a[index]


class Swapped(OneRow):
    def __getitem__(self, index):
        x = self.a[index]
        y = self.b[index]
        return y, x


class Generates(OneRow):
    def __getitem__(self, index):
        yield self.a[index]


class Slices(OneRow):
    def __getitem__(self, index):
        return self.a[index:]


class OtherIndex(OneRow):
    def __getitem__(self, index, other=0):
        return self.a[other]


class Property(OneRow):
    def __init__(self, a, b):
        self.kept = a

    @property
    def a(self):
        return self.kept + torch.rand(LENGTH)


class Asks(OneRow):
    def __getattribute__(self, name):
        return object.__getattribute__(self, name)


class AllAtOnce(OneRow):
    def __getitems__(self, indices):
        return [self.a[index] + 1 for index in indices]


class Wrapped(OneRow):
    __getitem__ = lambda *arguments: OneRow.__getitem__(*arguments) + 1  # noqa: E731


@pytest.mark.parametrize(
    "form",
    [
        *(Noisy, PicksTwice, TakesNext, TakesOneForAll, SometimesElse, TheSameTwice, Swapped),
        *(Generates, Slices, OtherIndex, Property, Asks, AllAtOnce, Wrapped),
    ],
)
def test_whatever_else_a_dataset_does_it_is_asked(form):
    """A call, a condition, another index, a property: its own method runs for every sample."""
    assert row_reader(form(COLUMNS["rows"], COLUMNS["labels"]), default_collate) is None


def test_slots_are_no_dictionary():
    """Where attributes may be anything, the method is called."""

    class Slots:
        __slots__ = ("a",)
        __getitem__ = OneRow.__getitem__

    data = Slots()
    data.a = COLUMNS["rows"]
    assert row_reader(data, default_collate) is None


class Doubled(TensorDataset):
    """A subclass may do anything."""

    def __getitem__(self, index):
        return tuple(2 * each for each in super().__getitem__(index))


class Rows(Dataset):
    """No TensorDataset, though it has its tensors."""

    tensors = (TENSORS["rows"],)


@pytest.mark.parametrize(
    "data",
    [
        Doubled(TENSORS["rows"]),
        Rows(),
        TensorDataset(torch.ones(3, requires_grad=True)),
        TensorDataset(torch.eye(3).to_sparse()),
        TensorDataset(torch.nn.Parameter(torch.ones(3), requires_grad=False)),
        TensorDataset(torch.ones(3, dtype=torch.complex64).conj()),
        Subset(Subset(TensorDataset(torch.ones(3)), [0, 1]), [0]),
    ],
    ids=lambda data: type(data).__name__,
)
def test_only_plain_tensors_are_read_at_once(data):
    """Everything else goes torch's way, where gradients, subclasses and layouts survive."""
    assert row_reader(data, default_collate) is None


def test_users_own_collation_is_asked():
    """A collate function of the user's, or one added to torch's, sees the rows."""
    data = TensorDataset(TENSORS["labels"])
    assert row_reader(data, list) is None
    before = default_collate_fn_map[torch.Tensor]
    default_collate_fn_map[torch.Tensor] = lambda batch, *, collate_fn_map: sum(batch)
    try:
        (first, *_) = DataLoader(data, batch_size=4)
    finally:
        default_collate_fn_map[torch.Tensor] = before
    assert first == [6]


def test_rows_are_counted_as_samples():
    """The figures do not depend on how rows are read."""
    loader = DataLoader(TensorDataset(TENSORS["labels"]), batch_size=5)
    list(loader)
    fetch = next(stage for stage in loader.snapshot().stages if stage.name == "fetch")
    assert fetch.tasks.num_tasks == LENGTH
    assert fetch.tasks.num_failures == 0


def test_rows_count_as_tries(caplog):
    """Of a budget of failures, too: one bad row among a hundred is one per cent."""
    data = InTuple(COLUMNS["rows"], COLUMNS["ints"])
    batches = [list(range(10))] * 9 + [[*range(9), LENGTH]]
    loader = DataLoader(data, batch_sampler=batches, on_error="skip", error_budget=0.01)
    assert [len(labels) for _, labels in loader] == [10] * 9 + [9]
    assert "1 of 100 samples of the epoch failed and were skipped" in caplog.text


def test_user_code_in_default_collate_draws_from_its_stream():
    """Where a function of the user's is part of torch's collation, its draws stay reproducible."""

    class Number:
        """A sample that torch does not know."""

    def noise(batch, *, collate_fn_map):
        return torch.rand(len(batch))

    def epoch(num_workers):
        data = [Number() for _ in range(6)]
        return [b.tolist() for b in DataLoader(data, 2, num_workers=num_workers, seed=3)]

    default_collate_fn_map[Number] = noise
    try:
        assert epoch(0) == epoch(2)
    finally:
        del default_collate_fn_map[Number]
