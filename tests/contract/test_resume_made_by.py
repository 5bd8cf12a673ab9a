"""A state says whose it is: what cannot be right is refused, what may be wrong is warned of."""

import itertools
import json
import random

import numpy as np
import pytest
import torch
from _covering import by_pairs
from _datasets import Live
from _loader_helpers import resumed
from _seats import NONE, THREADS, in_seats
from torch.utils.data import Dataset, DistributedSampler, RandomSampler, Sampler

from spdl_torch import DataLoader, PipelineDataset
from spdl_torch.pipeline import PipelineBuilder
from spdl_torch.testing import assert_resume_exact

pytestmark = pytest.mark.filterwarnings("error")


def rows(length=24, first=0):
    return list(range(first, first + length))


class RenamedSampler(RandomSampler):
    """Another kind of sampler with the same order."""


class Renamed(list):
    """Another kind of dataset with the same rows."""


def shuffled(**options):
    return {"batch_size": 4, "shuffle": True, **options}


def ranked(length=24, **options):
    sampler = DistributedSampler(range(length), num_replicas=1, rank=0, **options)
    return {"batch_size": 4, "sampler": sampler}


def state_of(seat, dataset, options, num_batches=2, whole=False):
    loader = seat.loader(dataset, **options)
    batches = iter(loader)
    for _ in range(num_batches):
        next(batches)
    if whole:
        list(batches)
    return json.loads(json.dumps(loader.state_dict()))


REFUSED = {
    "length": (r"length 7, was 24", shuffled, lambda: (rows(7), shuffled())),
    "shuffle": (r"shuffle False, was True", shuffled, lambda: (rows(), {"batch_size": 4})),
    "seed": (r"sampler_seed 1, was 0", ranked, lambda: (rows(), ranked(seed=1))),
    "ranks": (r"shuffle False, was True", ranked, lambda: (rows(), ranked(shuffle=False))),
}


@pytest.mark.parametrize("what", REFUSED)
@in_seats(NONE, THREADS)
def test_another_order_is_refused_within_an_epoch(seat, what):
    """At ``iter()``, again and again, by what differs; nothing is loaded, and no worker started."""
    told, saved, make = REFUSED[what]
    state = state_of(NONE, rows(), saved())
    dataset, options = make()
    loader = resumed(seat.loader(dataset, **options), state)
    for _ in range(2):
        with pytest.raises(ValueError, match=f"made_by: the state is of another loader: .*{told}"):
            iter(loader)


def test_another_order_may_follow_an_epoch():
    """Between two epochs nothing is lost: a dataset that has grown, or is shuffled from now on, is
    warned of."""
    state = state_of(NONE, rows(), {"batch_size": 4}, whole=True)
    loader = resumed(DataLoader(rows(30), batch_size=4, shuffle=True), state)
    with pytest.warns(UserWarning, match="length 30, was 24, .*shuffle True, was False"):
        batches = list(loader)
    assert sorted(torch.cat(batches).tolist()) == rows(30)
    assert len(list(loader)) == 8, "the warning comes once"


DOUBTFUL = {
    "dataset 'Renamed', was 'list'": lambda: (Renamed(rows()), shuffled()),
    "samplers .'RenamedSampler'., was .'RandomSampler'.": lambda: (
        rows(),
        {"batch_size": 4, "sampler": RenamedSampler(rows())},
    ),
    "seed 5, was None": lambda: (rows(), shuffled(seed=5)),
    "rng 'worker', was 'sample'": lambda: (rows(), shuffled(rng="worker")),
}


@pytest.mark.parametrize("what", DOUBTFUL)
@in_seats(NONE, THREADS)
def test_what_may_be_wrong_is_warned_of(seat, what):
    """A renamed class may have the same rows: the loader goes on where the state says."""
    state = state_of(seat, rows(), shuffled())
    dataset, options = DOUBTFUL[what]()
    loader = resumed(seat.loader(dataset, **options), state)
    with pytest.warns(UserWarning, match=what):
        assert len(list(loader)) == 4


def test_workers_that_stay_or_end_are_warned_of_where_later_epochs_follow_from_it():
    """Each epoch of workers that end draws a base seed, from the generator of the order; what is
    seeded does not depend on that."""
    for seeded in ({"seed": 3, "batch_size": 4}, ranked(seed=3) | {"seed": 3}):
        state = state_of(THREADS, rows(), seeded | {"persistent_workers": True})
        assert len(list(resumed(DataLoader(rows(), **seeded), state))) == 4
    for drawn in (shuffled(), shuffled(seed=3), {"batch_size": 4}):
        state = state_of(THREADS, rows(), drawn | {"persistent_workers": True})
        with pytest.warns(UserWarning, match="persistent_workers False, was True"):
            list(resumed(DataLoader(rows(), **drawn), state))


def test_what_may_change_is_no_matter():
    """Workers, the size of batches, the number of ranks."""
    state = state_of(NONE, rows(), ranked(seed=3))
    for options in (ranked(seed=3) | {"batch_size": 8}, ranked(seed=3) | {"num_workers": 2}):
        loader = resumed(DataLoader(rows(), **options), state)
        assert sum(map(len, loader)) == 16
    of_two = DistributedSampler(range(24), num_replicas=2, rank=1, seed=3)
    loader = resumed(DataLoader(rows(), batch_size=2, sampler=of_two), state)
    assert sum(map(len, loader)) == 8


def test_batches_that_came_ahead_keep_their_size():
    """They are counted as batches: with others, other samples would be left out."""
    state = state_of(NONE, rows(), {"batch_size": 4, "in_order": False})
    state["ahead"] = [1]
    loader = resumed(DataLoader(rows(), batch_size=2), state)
    with pytest.raises(ValueError, match=r"made_by: .*batch_size 2, was 4"):
        iter(loader)


ON_TWO = {"num_workers": 2, "isolation": "thread"}


@pytest.mark.parametrize(
    ("saved", "other", "told"),
    [
        ((Live, {}), (rows, {}), "workers: the state is of an iterable dataset, list is"),
        ((rows, {}), (Live, {}), "workers: the state is of a map-style dataset, Live is"),
        ((Live, ON_TWO), (Live, {}), "with num_workers=2, this one has num_workers=0"),
        ((Live, ON_TWO), (Live, {"num_workers": 1}), "=2, this one has num_workers=1"),
        (
            (rows, {"shuffle": True, "generator": torch.Generator()}),
            (rows, {"shuffle": True}),
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
    """Shuffles by what no state has."""

    def __init__(self, shuffle):
        self.shuffle = shuffle

    def __len__(self):
        return 24

    def __iter__(self):
        order = [*range(24)]
        self.shuffle(order)
        return iter(order)


class OwnBatches(OwnOrder):
    """The same of batches."""

    def __init__(self, shuffle, make=list):
        super().__init__(shuffle)
        self.make = make

    def __iter__(self):
        order = [*super().__iter__()]
        return (self.make(order[first : first + 4]) for first in range(0, 24, 4))

    def __len__(self):
        return 6


def another(kind=OwnOrder, **options):
    """A sampler whose order differs from that of every other one."""
    return kind(random.Random(random.SystemRandom().random()).shuffle, **options)


OWN_ORDERS = {
    "sampler": lambda: {"sampler": another(), "batch_size": 4},
    "alone": lambda: {"sampler": another(), "batch_size": None},
    "batches": lambda: {"batch_sampler": another(OwnBatches)},
    "tensors": lambda: {"batch_sampler": another(OwnBatches, make=torch.tensor)},
    "pairs": lambda: {
        "batch_sampler": another(OwnBatches, make=lambda order: [(n, "a") for n in order])
    },
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
    other = resumed(make(None), json.loads(json.dumps(loader.state_dict())))
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
        return DataLoader(rows(), batch_size=2, sampler=Every(num_replicas, rank))

    loader = of_rank(0)
    next(iter(loader))
    state = loader.state_dict()
    for rank, num_replicas in ((0, 2), (1, 2), (0, 1)):
        again = resumed(of_rank(rank, num_replicas), state)
        assert sum(map(len, again)) == 20 // num_replicas
    state = state_of(NONE, rows(), {"sampler": another(), "batch_size": 4})
    state["order"] = None
    loader = resumed(DataLoader(rows(), 4, sampler=another()), state)
    assert len(list(loader)) == 4


def test_a_damaged_origin_is_refused_by_name():
    """As every other field."""
    state = state_of(NONE, rows(), shuffled())
    for name, value in (("length", "x"), ("samplers", 3), ("ranks", 0), ("another", 1)):
        damaged = {**state, "made_by": {**state["made_by"], name: value}}
        with pytest.raises(ValueError, match=rf"made_by\.{name}"):
            DataLoader(rows()).load_state_dict(damaged)


def pipeline(source, *ops):
    builder = PipelineBuilder().add_source(source)
    for op in ops:
        builder = builder.pipe(op)
    return PipelineDataset(builder.add_sink())


def test_a_pipelines_state_says_whose_it_is():
    """A source may have grown; what differs is warned of."""
    dataset = pipeline(rows(8), str)
    items = iter(dataset)
    next(items)
    state = json.loads(json.dumps(dataset.state_dict()))
    items.close()
    again = resumed(pipeline(rows(8), str), state)
    assert len(list(again)) == 7
    for other, what in (
        (pipeline(rows(9), str), "length 9, was 8"),
        (pipeline(rows(8), str, int), "stages"),
        (pipeline(tuple(rows(8)), str), "source 'tuple', was 'list'"),
    ):
        other.load_state_dict(state)
        with pytest.warns(UserWarning, match=f"PipelineDataset.load_state_dict: .*{what}"):
            list(other)
