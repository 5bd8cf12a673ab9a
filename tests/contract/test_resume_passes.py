"""A loader's state has the passes of the pipeline datasets inside its dataset.

Their order is another one in each epoch, and only they know which comes next.
"""

import json
import logging

import pytest
import torch
from _covering import by_pairs
from _seats import FORKED, NONE, SERVED, THREADS, in_seats
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


def kinds_in_seats():
    """Every kind in both places, and two in processes; asked before in one of its places and not in
    the other. The other rows are long forms."""
    for number, kind in enumerate(INSIDE):
        seats = ["no workers", "threads"]
        if kind in ("mixture in a mixture", "chain"):
            seats.append("persistent processes")
        for place, seat in enumerate(seats):
            for is_asked_before in (False, True):
                is_long = is_asked_before != ((number + place) % 2 == 0)
                marks = [pytest.mark.long] if is_long else []
                yield pytest.param(kind, seat, is_asked_before, marks=marks)


@pytest.mark.parametrize(("kind", "seat", "is_asked_before"), list(kinds_in_seats()))
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


class GoingOn(Drawing):
    """Keeps its position, too; after a pass it stands at its end until it is iterated again."""

    def __init__(self):
        super().__init__()
        self.order, self.position = [], 0

    def __iter__(self):
        if self.position == len(self.order) and not self.rests:
            self.order, self.position = list(super().__iter__()), 0
        self.rests = False
        while self.position < len(self.order):
            self.position += 1
            yield self.order[self.position - 1]

    rests = False

    def state_dict(self):
        return {**super().state_dict(), "order": [*self.order], "position": self.position}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.order, self.position, self.rests = [*state["order"]], state["position"], True


def odd(number):
    """Drops half of the items."""
    return number if number % 2 else None


PIPELINES = {
    "alike": lambda source: source.pipe(int),
    "groups": lambda source: source.pipe(int).aggregate(3).pipe(tuple),
    "drops": lambda source: source.pipe(int).pipe(odd),
}
PARTS = {
    "whole": {},
    "even": {"num_replicas": 2, "rank": 1},
    "uneven": {"num_replicas": 3, "rank": 1, "tail": "uneven"},
}


def stateful(source, pipeline, part):
    """A pipeline dataset whose source keeps a state of its own."""
    stages = PIPELINES[pipeline](PipelineBuilder().add_source(source()))
    return PipelineDataset(stages.add_sink(), **PARTS[part])


def from_every_item(make, num_passes=3):
    """Resume from every item of each pass, when a state was asked for before."""
    whole = make()
    passes = [list(whole) for _ in range(num_passes)]
    for number, num_had in [(e, n) for e in range(num_passes) for n in range(len(passes[e]) + 1)]:
        run, again = make(), make()
        run.state_dict()
        for _ in range(number):
            list(run)
        items = iter(run)
        had = [next(items) for _ in range(num_had)]
        again.load_state_dict(json.loads(json.dumps(run.state_dict())))
        rest = [list(again) for _ in range(num_passes - number)]
        assert [had + rest[0], *rest[1:]] == passes[number:], (number, num_had)


@by_pairs(source=[GoingOn, shuffling_loader], pipeline=PIPELINES, part=PARTS)
def test_source_of_a_pipeline_is_exact_within_each_pass(source, pipeline, part):
    """Alone or as a rank's part, whatever the ops do with its items."""
    from_every_item(lambda: stateful(source, pipeline, part))


INSIDE_OF_LOADERS = {
    "alone": lambda: stateful(GoingOn, "alike", "whole"),
    "a rank's": lambda: stateful(GoingOn, "alike", "even"),
    "mixture": lambda: mix({name: stateful(GoingOn, "alike", "whole") for name in "ab"}),
    "wrapped": lambda: Wrapped(stateful(GoingOn, "drops", "whole")),
}


@pytest.mark.parametrize("kind", INSIDE_OF_LOADERS)
@in_seats(NONE, THREADS, FORKED, SERVED)  # nobody vouches for it in threads
def test_source_of_a_pipeline_is_exact_in_a_loader(seat, kind):
    """When a state was asked for before, in later epochs, too."""

    def make():
        dataset = INSIDE_OF_LOADERS[kind]()
        return seat.loader(dataset, batch_size=None, persistent_workers=True)

    whole = make()
    epochs = [list(whole) for _ in range(3)]
    assert epochs[0] != epochs[1]
    stops = [(0, 1), (1, 0), (1, 3)]
    for epoch, num_had in stops if seat.num_workers == 0 or seat.are_threads else stops[-1:]:
        run, again = make(), make()
        run.state_dict()
        for _ in range(epoch):
            list(run)
        batches = iter(run)
        had = [next(batches) for _ in range(num_had)]
        again.load_state_dict(json.loads(json.dumps(run.state_dict())))
        assert [had + list(again), *(list(again) for _ in range(2 - epoch))] == epochs[epoch:]


@pytest.mark.parametrize("kind", INSIDE_OF_LOADERS)
@in_seats(NONE, THREADS, FORKED)
def test_a_first_state_within_a_pass_says_that_it_counts(seat, kind, caplog):
    """Once for each dataset, and that a later pass may be another one; none that begins later."""
    loader = seat.loader(INSIDE_OF_LOADERS[kind](), batch_size=None, persistent_workers=True)
    list(loader)
    batches = iter(loader)
    next(batches)
    with caplog.at_level(logging.WARNING, "spdl_torch.data"):
        loader.state_dict()
        next(batches)
        loader.state_dict()
        list(loader)
        next(iter(loader))
        loader.state_dict()
    told = [each for each in caplog.messages if "state_dict: nobody had asked" in each]
    assert told, "a warning"
    assert all("is exact only if all its" in each for each in told)
    assert len(told) <= max(1, seat.num_workers) * (2 if kind == "mixture" else 1)


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
