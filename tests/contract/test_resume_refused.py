"""What is resumed has to fit: what cannot be right is refused, what may be wrong is warned of."""

import itertools
import random
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
from support.covering import by_pairs
from support.datasets import Drawn, Live, Walk
from support.loaders import batches_of, resumed, stored
from support.seats import FORKED, NONE, THREADS, in_seats
from torch.utils.data import Dataset, DistributedSampler, Sampler

from spdl_torch import DataLoader, PipelineDataset
from spdl_torch.data import mix
from spdl_torch.data.sources import as_source
from spdl_torch.pipeline import PipelineBuilder
from spdl_torch.testing import assert_resume_exact

ROWS = list(range(24))


def shuffled(**options):
    return {"batch_size": 4, "shuffle": True, **options}


def ranked(**options):
    sampler = DistributedSampler(range(24), num_replicas=1, rank=0, **options)
    return {"batch_size": 4, "sampler": sampler}


def state_of(seat, dataset, options, num_batches=2):
    """Within an epoch; None = after it."""
    loader = seat.loader(dataset, **options)
    batches = iter(loader)
    assert batches_of(itertools.islice(batches, num_batches))
    return stored(loader)


REFUSED = {
    "length 7, was 24": (shuffled, lambda: (ROWS[:7], shuffled())),
    "shuffle False, was True": (shuffled, lambda: (ROWS, {"batch_size": 4})),
    "sampler_seed 1, was 0": (ranked, lambda: (ROWS, ranked(seed=1))),
}


@pytest.mark.parametrize("told", REFUSED)
@in_seats(NONE, THREADS)
def test_another_order_is_refused_within_an_epoch(seat, told):
    """At ``iter()``, again and again, by what differs; nothing is loaded, and no worker started."""
    saved, make = REFUSED[told]
    dataset, options = make()
    loader = resumed(seat.loader(dataset, **options), state_of(NONE, ROWS, saved()))
    for _ in range(2):
        with pytest.raises(ValueError, match=f"made_by: the state is of another loader: .*{told}"):
            iter(loader)


def test_another_order_may_follow_an_epoch():
    """Between two epochs nothing is lost where a dataset has grown, or is shuffled from now on."""
    state = state_of(NONE, ROWS, {"batch_size": 4}, None)
    loader = resumed(DataLoader(range(30), batch_size=4, shuffle=True), state)
    assert sorted(torch.cat(list(loader)).tolist()) == [*range(30)]


def test_what_may_change_is_no_matter():
    """Workers, the size of batches, the number of ranks."""
    state = state_of(NONE, ROWS, ranked(seed=3))
    for options in (ranked(seed=3) | {"batch_size": 8}, ranked(seed=3) | {"num_workers": 2}):
        loader = resumed(DataLoader(ROWS, **options), state)
        assert sum(map(len, loader)) == 16
    of_two = DistributedSampler(range(24), num_replicas=2, rank=1, seed=3)
    loader = resumed(DataLoader(ROWS, batch_size=2, sampler=of_two), state)
    assert sum(map(len, loader)) == 8


def test_batches_that_came_ahead_keep_their_size():
    """They are counted as batches: with others, other samples would be left out."""
    state = state_of(NONE, ROWS, {"batch_size": 4, "in_order": False})
    state["ahead"] = [1]
    loader = resumed(DataLoader(ROWS, batch_size=2), state)
    with pytest.raises(ValueError, match=r"made_by: .*batch_size 2, was 4"):
        iter(loader)


ON_TWO = {"num_workers": 2, "isolation": "thread"}


@pytest.mark.parametrize(
    ("saved", "other", "told"),
    [
        ((Live, {}), (lambda: ROWS, {}), "workers: the state is of an iterable dataset, list is"),
        ((lambda: ROWS, {}), (Live, {}), "workers: the state is of a map-style dataset, Live is"),
        ((Live, ON_TWO), (Live, {}), "with num_workers=2, this one has num_workers=0"),
        ((Live, ON_TWO), (Live, {"num_workers": 1}), "=2, this one has num_workers=1"),
        (
            (lambda: ROWS, {"shuffle": True, "generator": torch.Generator()}),
            (lambda: ROWS, {"shuffle": True}),
            r"2 generator\(s\), this loader and its samplers have 1",
        ),
    ],
)
def test_state_of_a_loader_of_another_kind_is_refused(saved, other, told):
    """Iterables divide themselves by the number of workers; without the generator the order would
    be another, and nobody would notice."""
    (make, options), (make_other, others) = saved, other
    state = state_of(NONE, make(), options)
    with pytest.raises(ValueError, match=told):
        iter(resumed(DataLoader(make_other(), **others), state))


class OwnOrder(Sampler):
    """Shuffles by what no state has; gives indices, or batches of them as ``make`` has them."""

    def __init__(self, shuffle=None, make=None):
        # One whose order differs from that of every other one.
        self.shuffle = shuffle or random.Random(random.SystemRandom().random()).shuffle
        self.make = make

    def __len__(self):
        return 6 if self.make else 24

    def __iter__(self):
        order = [*range(24)]
        self.shuffle(order)
        batches = (order[first : first + 4] for first in range(0, 24, 4))
        return map(self.make, batches) if self.make else iter(order)


OWN_ORDERS = {
    "sampler": lambda: {"sampler": OwnOrder(), "batch_size": 4},
    "alone": lambda: {"sampler": OwnOrder(), "batch_size": None},
    "batches": lambda: {"batch_sampler": OwnOrder(make=list)},
    "tensors": lambda: {"batch_sampler": OwnOrder(make=torch.tensor)},
    "pairs": lambda: {"batch_sampler": OwnOrder(make=lambda order: [(n, "a") for n in order])},
    "numpy": lambda: {"sampler": OwnOrder(np.random.shuffle), "batch_size": 4},
}


class Anything(Dataset):
    """Takes any index, and changes the list of them that it gets."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return int(index[0] if isinstance(index, tuple) else index)

    def __getitems__(self, indices):
        if isinstance(indices, list):
            indices.reverse()
        return [self[index] for index in indices]


@by_pairs(seat=[NONE, THREADS], kind=OWN_ORDERS)
def test_a_sampler_whose_random_numbers_no_state_has(seat, kind):
    """Of samples or batches: seeded again by its user it goes on, after each batch; another order
    is refused, and after ``iter()`` failed, the state is still there."""

    def make(seed=5):
        options = OWN_ORDERS[kind]()
        if seed is not None:
            sampler = options.get("sampler") or options["batch_sampler"]
            sampler.shuffle = random.Random(seed).shuffle
        return seat.loader(Anything(), **options)

    assert_resume_exact(make, num_epochs=1)
    loader = make()
    assert len([*itertools.islice(loader, 4)]) == 4
    other = resumed(make(None), stored(loader))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"order: the sampler \(.*Own.* gives other"):
            iter(other)


def test_indices_of_another_rank_are_not_compared():
    """Any rank may resume the state of one; and a state may have none of them."""

    class Every(Sampler):
        def __init__(self, num_replicas, rank):
            self.num_replicas, self.rank = num_replicas, rank

        def __iter__(self):
            return iter(range(self.rank, 24, self.num_replicas))

    def of_rank(rank, num_replicas=2):
        return DataLoader(ROWS, batch_size=2, sampler=Every(num_replicas, rank))

    loader = of_rank(0)
    next(iter(loader))
    state = loader.state_dict()
    for rank, num_replicas in ((0, 2), (1, 2), (0, 1)):
        again = resumed(of_rank(rank, num_replicas), state)
        assert sum(map(len, again)) == 20 // num_replicas
    state = state_of(NONE, ROWS, {"sampler": OwnOrder(), "batch_size": 4})
    state["order"] = None
    loader = resumed(DataLoader(ROWS, 4, sampler=OwnOrder()), state)
    assert len(list(loader)) == 4


class Cells(Sampler):
    """Gives keys of two numbers, and keeps its place."""

    place = 0

    def __iter__(self):
        while self.place < 24:
            self.place += 1
            yield self.place - 1, 0
        self.place = 0

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


def test_indices_that_json_changes_are_refused():
    """A list in place of a tuple would select other samples. They stay through ``torch.save``."""

    def loader():
        return THREADS.loader(np.arange(240).reshape(24, 10), None, sampler=Cells())

    uncut, begun = list(loader()), loader()
    batches_of(itertools.islice(batches := iter(begun), 3))
    state = begun.state_dict()
    assert any(state["pending"])
    with pytest.raises(ValueError, match=r"pending: .*of other types"):
        iter(resumed(loader(), stored(begun)))
    assert torch.equal(torch.stack(list(resumed(loader(), state))), torch.stack(uncut[3:]))
    del batches


def test_a_state_is_not_taken_from_what_is_no_state():
    """Nor from a newer release, or an older one's format."""
    loader = DataLoader(Drawn(8))
    state = loader.state_dict()
    no_state, other = r"what DataLoader\.state_dict", "not a state of a DataLoader"
    for wrong, told in (
        *((bad, no_state) for bad in ({}, None, {"epoch": 3})),
        ({name: state[name] for name in state if name != "version"}, "without a version"),
        ({**state, "version": 99}, r"version 99, .* DataLoader knows version 5 alone\. Upgrade"),
        ({**state, "version": 4}, r"version 4, .* DataLoader knows version 5 alone"),
        ({**state, "something": 1}, other),
    ):
        with pytest.raises(ValueError, match=told):
            loader.load_state_dict(wrong)


@dataclass
class Numbers:
    """A source of unknown length, which begins anywhere."""

    length: int

    def __iter__(self):
        return self.iterate()

    def iterate(self, start=0):
        return iter(range(start, self.length))


class Sizeless(Numbers):
    """One for an event loop, which begins at its beginning alone."""

    iterate = None

    async def __aiter__(self):
        for number in range(self.length):
            yield number


SHORTER = {
    "no source": Walk,
    "list": range,
    "begins anywhere": Numbers,
    "async": Sizeless,
    "stream": lambda length: as_source(partial(iter, range(length))),
    "shuffled": lambda length: as_source(partial(iter, range(length))).shuffle(1, 3),
    "mixture": lambda length: mix(
        {name: as_source(partial(iter, range(length))) for name in ("one", "two")}
    ),
}


@pytest.mark.filterwarnings("ignore:PipelineDataset.load_state_dict")  # its length is another
@pytest.mark.parametrize(
    ("seat", "source"),
    [*itertools.product((NONE, THREADS), SHORTER), (FORKED, "no source"), (FORKED, "stream")],
    ids=str,
)
def test_an_iterable_that_ends_before_the_state_is_an_error(seat, source):
    """Items that were handed out cannot be passed over, whether the source of a pipeline knows its
    length, or has to be asked for an item; one that ends where the state stands is right, and its
    epoch is over."""

    def loader_of(length):
        made = SHORTER[source](length)
        if source == "no source":
            return seat.loader(made, batch_size=None)
        builder = PipelineBuilder().add_source(made)
        builder.aggregate(2, drop_last=True)
        dataset = PipelineDataset(builder.add_sink(), num_replicas=1, rank=0)
        return seat.loader(dataset, batch_size=None)

    def rest(length, state):
        return list(resumed(loader_of(length), state))

    loader = loader_of(16)
    loader.state_dict()
    for _ in loader:
        state = stored(loader)
    assert rest(16, state) == []
    # A state that takes long is taken less often, and has the items since beside it.
    match = r"(num_source|num_items|num_after): resuming makes .* but it ended after"
    with pytest.raises(ValueError, match=match):
        rest(4, state)
