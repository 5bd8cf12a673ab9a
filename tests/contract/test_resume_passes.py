"""A loader's state has the passes of the pipeline datasets inside its dataset.

Their order is another one in each epoch, and only they know which comes next.
"""

import pytest
import torch
from torch.utils.data import ChainDataset, IterableDataset

from spdl_torch import DataLoader, PipelineDataset
from spdl_torch.data import mix
from spdl_torch.data.sources import ListSource
from spdl_torch.pipeline import PipelineBuilder


def shuffled(first):
    """Eight numbers, in another order in each pass."""
    source = ListSource(range(first, first + 8)).shuffle(1)
    return PipelineDataset(PipelineBuilder().add_source(source).add_sink())


class Wrapped(IterableDataset):
    """Hands out what is inside, as a user's own class would."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __iter__(self):
        yield from self.dataset


INSIDE = {
    "mixture": lambda: mix({"a": shuffled(0), "b": shuffled(100)}),
    "to the last end": lambda: mix({"a": shuffled(0), "b": shuffled(100)}, stop="all"),
    "mixture in a mixture": lambda: mix(
        {"a": shuffled(0), "b": mix({"x": shuffled(100), "y": shuffled(200)})}
    ),
    "chain": lambda: ChainDataset([shuffled(0), shuffled(100)]),
    "wrapped": lambda: Wrapped(shuffled(0)),
    "twice the same": lambda: ChainDataset([same := shuffled(0), same]),
}
SEATS = {
    "no workers": {},
    "threads": {"num_workers": 2, "isolation": "thread"},
    "persistent processes": {
        "num_workers": 2,
        "isolation": "process",
        "persistent_workers": True,
    },
}


def batches(loader):
    """One epoch."""
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize(
    ("kind", "seat"),
    [
        *[(kind, seat) for kind in INSIDE for seat in ("no workers", "threads")],
        *[(kind, "persistent processes") for kind in ("mixture in a mixture", "chain")],
    ],
)
@pytest.mark.parametrize("is_asked_before", [False, True])
def test_epochs_go_on_from_every_kind_of_state(kind, seat, is_asked_before):
    """Before the first batch, in the middle, before the loop has seen the end, and between epochs;
    whether or not somebody has asked for a state before training.
    """

    def make():
        return DataLoader(INSIDE[kind](), batch_size=3, **SEATS[seat])

    whole = make()
    epochs = [batches(whole) for _ in range(3)]
    if seat != "threads":  # whose copies of the dataset end with the epoch
        assert epochs[0] != epochs[1]
    for epoch, num_had in [(e, n) for e in (0, 1) for n in (0, 1, len(epochs[e]), None)]:
        run = make()
        if is_asked_before:
            run.state_dict()
        for _ in range(epoch):
            batches(run)
        iterator = iter(run)
        for _ in range(len(epochs[epoch]) if num_had is None else num_had):
            next(iterator)
        if num_had is None:
            assert next(iterator, None) is None
        again = make()
        again.load_state_dict(run.state_dict())
        rest = [] if num_had is None else epochs[epoch][num_had:]
        got = batches(again) if rest else []
        if num_had == len(epochs[epoch]):  # its end comes first, and may be all of an epoch
            got = batches(again) or batches(again)
            rest = epochs[epoch + 1]
        assert got == rest, (epoch, num_had)
        if num_had != len(epochs[epoch]):
            assert batches(again) == epochs[epoch + 1], (epoch, num_had)


def test_state_is_refused_where_others_are_inside():
    """It names what is missing."""
    loader = DataLoader(INSIDE["chain"](), batch_size=3)
    iterator = iter(loader)
    next(iterator)
    other = DataLoader(ChainDataset([shuffled(0)]), batch_size=3)
    other.load_state_dict(loader.state_dict())
    with pytest.raises(ValueError, match=r"2 PipelineDataset\(s\), and ChainDataset here has 1"):
        next(iter(other))


class Drawing:
    """A source that keeps the state of its generator alone."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(3)

    def __iter__(self):
        yield from torch.randperm(8, generator=self.generator).tolist()

    def state_dict(self):
        return {"generator": self.generator.get_state().tolist()}

    def load_state_dict(self, state):
        self.generator.set_state(torch.tensor(state["generator"], dtype=torch.uint8))


def shuffling_loader():
    """A loader as a source, whose order follows from its generator."""
    return DataLoader(range(8), None, shuffle=True, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("source", [Drawing, shuffling_loader])
@pytest.mark.parametrize("num_passes", [1, 2])
def test_source_of_a_pipeline_keeps_its_state_from_pass_to_pass(source, num_passes):
    """A state of a pass whose end the loop has seen has it as well."""

    def make():
        return PipelineDataset(PipelineBuilder().add_source(source()).pipe(int).add_sink())

    whole, run, again = make(), make(), make()
    passes = [list(whole) for _ in range(4)]
    assert passes[0] != passes[1] != passes[2]
    for _ in range(num_passes):
        list(run)
    again.load_state_dict(run.state_dict())
    assert [list(again), list(again)] == passes[num_passes : num_passes + 2]


def listed(items):
    """A pipeline dataset whose passes are all alike."""
    return PipelineDataset(PipelineBuilder().add_source(items).add_sink())


@pytest.mark.parametrize("seat", SEATS)
def test_state_after_resuming_knows_sources_that_were_not_drawn_from_again(seat):
    """A resumed mixture gives a state at every batch, and each of them resumes the rest."""

    def make():
        sources = {"often": listed(range(30)), "seldom": listed(range(100, 130))}
        return DataLoader(mix(sources, {"often": 6, "seldom": 1}), batch_size=2, **SEATS[seat])

    whole, run = make(), make()
    epoch = batches(whole)
    run.state_dict()
    first = next(number for number, batch in enumerate(run, 1) if batch.max() >= 100)
    again = make()
    again.load_state_dict(run.state_dict())
    for num_had, batch in enumerate(again, first + 1):
        assert batch.tolist() == epoch[num_had - 1]
        third = make()
        third.load_state_dict(again.state_dict())
        if num_had < len(epoch):
            assert batches(third) == epoch[num_had:], num_had


@pytest.mark.parametrize("seat", SEATS)
@pytest.mark.parametrize("kind", ["alone", "to the last end", "chain", "wrapped"])
def test_epoch_named_after_loading_counts(kind, seat):
    """A state between epochs does not undo it; one that is loaded later does."""

    def make():
        dataset = shuffled(0) if kind == "alone" else INSIDE[kind]()
        return DataLoader(dataset, batch_size=3, **SEATS[seat])

    def name(loader, epoch):
        inside = loader.dataset
        for each in [inside] if hasattr(inside, "set_epoch") else insides(inside):
            each.set_epoch(epoch)

    fresh, run, named_after, named_before = make(), make(), make(), make()
    name(fresh, 5)
    name(run, 0)
    batches(run)
    state = run.state_dict()
    named_after.load_state_dict(state)
    name(named_after, 5)
    assert batches(named_after) == batches(fresh)
    if seat != "threads":  # whose copies of the dataset end with the epoch
        undisturbed = batches(run)
        name(named_before, 5)
        named_before.load_state_dict(state)
        assert batches(named_before) == undisturbed


def insides(dataset):
    """The pipeline datasets of a chain or a wrapper."""
    return dataset.datasets if hasattr(dataset, "datasets") else [dataset.dataset]
