"""Batches that are read at once equal those that torch stacks row by row."""

import pytest
import torch
from hypothesis import given, settings, strategies as st
from support.datasets import Made
from support.loaders import DataLoader, epoch_of, frozen, torch_loader
from torch.utils.data import Subset, TensorDataset
from torch.utils.data._utils.collate import default_collate_fn_map

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


def events_of(loader):
    """Batches with their layout, or the error's type and text."""

    def layout(batch):
        tensors = [batch] if isinstance(batch, torch.Tensor) else batch
        return type(batch), frozen(batch), [each.stride() for each in tensors]

    return epoch_of(loader, layout, lambda error: (type(error), str(error)))


@settings(deadline=None, max_examples=60)
@given(
    names=tensors,
    indices=st.lists(st.lists(numbers, min_size=1, max_size=5), max_size=6),
    subset=st.none() | st.lists(numbers, min_size=LENGTH, max_size=LENGTH),
    workers=st.sampled_from([{}, {"num_workers": 2, "isolation": "thread"}]),
    rng=st.sampled_from(["sample", "worker"]),
)
def test_batches_equal_torchs(names, indices, subset, workers, rng):
    """Values, types and strides, in every order of rows, negative ones too."""
    data = TensorDataset(*(TENSORS[name] for name in names))
    if subset is not None:
        data = Subset(data, subset)
    ours = DataLoader(data, batch_sampler=indices, rng=rng, **workers)
    assert events_of(ours) == events_of(torch_loader(data, batch_sampler=indices))


@pytest.mark.parametrize(
    "index",
    [[0, LENGTH], [-LENGTH - 1], [True, 2], [torch.tensor(3), 1], [slice(0, 2)], [0.5], []],
    ids=repr,
)
@pytest.mark.parametrize("wrap", [lambda data: data, lambda data: Subset(data, range(LENGTH))])
def test_other_indices_give_what_torch_gives(index, wrap):
    """Rows that do not exist, and what is not a plain number: torch's batch or torch's error."""
    data = wrap(TensorDataset(TENSORS["rows"], TENSORS["labels"]))
    ours = DataLoader(data, batch_sampler=[[1], index, [2]])
    assert events_of(ours) == events_of(torch_loader(data, batch_sampler=[[1], index, [2]]))


def test_tensors_may_be_replaced():
    """The dataset's tensors are those of the moment, plain or not."""
    data = TensorDataset(torch.zeros(LENGTH))
    batches, found = iter(DataLoader(data, batch_size=4)), []
    for rows in (torch.zeros(LENGTH), torch.arange(LENGTH), [float(n) for n in range(LENGTH)]):
        data.tensors = (rows,)
        found.append(next(batches)[0].tolist())
    assert found == [[0, 0, 0, 0], [4, 5, 6, 7], [8, 9, 10, 11]]


class Drawn(list):
    """Rows with noise, or numbers of rows: each draws as it is looked up."""

    def __getitem__(self, index):
        return super().__getitem__(index) + int(torch.randint(3, ()))

    def size(self, _):
        return len(self)


@pytest.mark.parametrize("of", [TensorDataset, Subset])
def test_what_draws_though_it_has_the_type_of_rows_draws_from_the_samples_streams(of):
    """Tensors put in the dataset later, and the indices of a Subset: without workers as with."""
    found = []
    for num_workers in (0, 2):
        data = TensorDataset(torch.arange(LENGTH))
        if of is Subset:
            data = Subset(data, Drawn(range(LENGTH - 3)))
        loader = DataLoader(data, batch_size=3, num_workers=num_workers, seed=5)
        list(loader)
        if of is TensorDataset:
            data.tensors = (Drawn(range(LENGTH)),)
        batches, before = iter(loader), torch.get_rng_state()
        found.append([batch[0].tolist() for batch in batches])
        assert torch.equal(torch.get_rng_state(), before)
    assert found[0] == found[1] != [batch[0].tolist() for batch in DataLoader(data, batch_size=3)]


class Doubled(TensorDataset):
    """What its method does is the user's."""

    def __getitem__(self, index):
        return tuple(2 * row for row in super().__getitem__(index))


@pytest.mark.parametrize(
    "data",
    [
        Doubled(TENSORS["rows"]),
        TensorDataset(torch.ones(3, requires_grad=True)),
        TensorDataset(torch.nn.Parameter(torch.ones(3), requires_grad=False)),
        TensorDataset(torch.ones(3, dtype=torch.complex64).conj()),
    ],
    ids=lambda data: type(data.tensors[0]).__name__,
)
def test_what_is_no_plain_tensor_is_read_as_torch_reads_it(data):
    """Gradients, subclasses and what a class does survive."""
    ours, theirs = (
        [(type(each), each.requires_grad, each.is_conj(), each.tolist()) for (each,) in loader]
        for loader in (DataLoader(data, 2), torch_loader(data, 2))
    )
    assert ours == theirs


def test_users_own_collation_is_asked(monkeypatch):
    """A collate function of the user's, or one added to torch's, sees the rows; its draws are those
    of its batch, wherever it runs."""
    data = TensorDataset(TENSORS["labels"])

    def with_noise(batch, *, collate_fn_map):
        return torch.stack(batch) + torch.rand(len(batch))

    monkeypatch.setitem(default_collate_fn_map, torch.Tensor, with_noise)
    without, with_workers = (
        [batch[0].tolist() for batch in DataLoader(data, 4, num_workers=number, seed=3)]
        for number in (0, 2)
    )
    assert without == with_workers
    assert [int(each) for batch in without for each in batch] == [*range(LENGTH)]
    assert without[0] != [0, 1, 2, 3]


def test_rows_count_as_tries(caplog):
    """In the error budget, too: one bad row among a hundred is one per cent."""
    data = TensorDataset(TENSORS["rows"], TENSORS["labels"])
    batches = [list(range(10))] * 9 + [[*range(9), LENGTH]]
    loader = DataLoader(data, batch_sampler=batches, on_error="skip", error_budget=0.01)
    assert [len(labels) for _, labels in loader] == [10] * 9 + [9]
    assert "1 of 100 samples of the epoch failed and were skipped" in caplog.text


@pytest.mark.parametrize(
    ("data", "expected"), [(Made(float), True), (TensorDataset(torch.ones(8)), False)]
)
def test_report_knows_whether_samples_are_made_one_by_one(data, expected):
    """Its advice depends on it."""
    list(loader := DataLoader(data, 4))
    assert ("one by one" in loader.report().traits) == expected
