"""A state says whose it is: what cannot be right is refused, what may be wrong is warned of."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from _loader_helpers import no_thread_left
from _seats import NONE, THREADS, in_seats
from _state_data import Live
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    ConcatDataset,
    DistributedSampler,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from spdl_torch import DataLoader, PipelineDataset
from spdl_torch.data import bucket, mix, pack
from spdl_torch.data.checkpoint.contents import contents_of
from spdl_torch.data.sources import ListSource
from spdl_torch.pipeline import PipelineBuilder

__all__ = ["no_thread_left"]

pytestmark = pytest.mark.filterwarnings("error")


def rows(length=24, first=0):
    return list(range(first, first + length))


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


def weighted(*weights):
    return {"batch_size": 4, "sampler": WeightedRandomSampler(weights * 12, 24)}


def redrawing(**options):
    return {"batch_size": 4, "sampler": RandomSampler(range(24), **options)}


def listed(*indices):
    return {"batch_size": 4, "sampler": [*indices]}


def subset(*indices):
    return {"batch_size": 4, "sampler": SubsetRandomSampler(indices)}


ANOTHER = "a sampler with other indices, weights or settings"
REFUSED = {
    f"{ANOTHER} than": (lambda: weighted(1.0, 2.0), lambda: (rows(), weighted(2.0, 1.0))),
    f"{ANOTHER} than ": (redrawing, lambda: (rows(), redrawing(replacement=True))),
    f"{ANOTHER} than i": (
        lambda: listed(*range(24)),
        lambda: (rows(), listed(*reversed(range(24)))),
    ),
    f"{ANOTHER} than it": (
        lambda: subset(*range(12)),
        lambda: (rows(), subset(*range(12, 24))),
    ),
    "length 7, was 24": (shuffled, lambda: (rows(7), shuffled())),
    "shuffle False, was True": (shuffled, lambda: (rows(), {"batch_size": 4})),
    "sampler_seed 1, was 0": (ranked, lambda: (rows(), ranked(seed=1))),
    "shuffle False, was True, ": (ranked, lambda: (rows(), ranked(shuffle=False))),
}


@pytest.mark.parametrize("what", REFUSED)
@in_seats(NONE, THREADS)
def test_another_order_is_refused_within_an_epoch(seat, what):
    """At ``iter()``, again and again, by what differs; nothing is loaded."""
    saved, make = REFUSED[what]
    state = state_of(seat, rows(), saved())
    dataset, options = make()
    loader = seat.loader(dataset, **options)
    loader.load_state_dict(state)
    for _ in range(2):
        with pytest.raises(
            ValueError, match=f"made_by: the state is of another loader: .*{what}"[:-2]
        ):
            iter(loader)


def test_another_order_may_follow_an_epoch():
    """Between two epochs nothing is lost: a dataset that has grown, or is shuffled from now on, is
    warned of."""
    state = state_of(NONE, rows(), {"batch_size": 4}, whole=True)
    loader = DataLoader(rows(30), batch_size=4, shuffle=True)
    loader.load_state_dict(state)
    with pytest.warns(UserWarning, match="length 30, was 24, .*shuffle True, was False"):
        batches = list(loader)
    assert sorted(torch.cat(batches).tolist()) == rows(30)
    assert len(list(loader)) == 8, "the warning comes once"


DOUBTFUL = {
    "dataset 'Renamed', was 'list'": lambda: (Renamed(rows()), shuffled()),
    "contents other than they were": lambda: (rows(first=100), shuffled()),
    "samplers .'WeightedRandomSampler'., was .'RandomSampler'.": lambda: (
        rows(),
        {"batch_size": 4, "sampler": WeightedRandomSampler([1.0] * 24, 24)},
    ),
    "seed 5, was None": lambda: (rows(), shuffled(seed=5)),
}


@pytest.mark.parametrize("what", DOUBTFUL)
@in_seats(NONE, THREADS)
def test_what_may_be_wrong_is_warned_of(seat, what):
    """A renamed class may have the same rows: the loader goes on where the state says."""
    state = state_of(seat, rows(), shuffled())
    dataset, options = DOUBTFUL[what]()
    loader = seat.loader(dataset, **options)
    loader.load_state_dict(state)
    with pytest.warns(UserWarning, match=what):
        assert len(list(loader)) == 4


def test_what_may_change_is_no_matter():
    """Workers, the size of batches, the number of ranks; and states of version 1 say nothing."""
    state = state_of(NONE, rows(), ranked(seed=3))
    for options in (ranked(seed=3) | {"batch_size": 8}, ranked(seed=3) | {"num_workers": 2}):
        loader = DataLoader(rows(), **options)
        loader.load_state_dict(state)
        assert sum(map(len, loader)) == 16
    of_two = DistributedSampler(range(24), num_replicas=2, rank=1, seed=3)
    loader = DataLoader(rows(), batch_size=2, sampler=of_two)
    loader.load_state_dict(state)
    assert sum(map(len, loader)) == 8
    old = {name: state[name] for name in state if name not in ("made_by", "sampler_ended")}
    loader = DataLoader(rows(first=100), **ranked(seed=4))
    loader.load_state_dict({**old, "version": 1})
    assert sum(map(len, loader)) == 16


def test_batches_that_came_ahead_keep_their_size():
    """They are counted as batches: with others, other samples would be left out."""
    state = state_of(NONE, rows(), {"batch_size": 4, "in_order": False})
    state["ahead"] = [1]
    loader = DataLoader(rows(), batch_size=2)
    loader.load_state_dict(state)
    with pytest.raises(ValueError, match=r"made_by: .*batch_size 2, was 4"):
        iter(loader)


def test_an_iterables_state_is_not_a_map_style_datasets():
    """Nor the other way round."""
    of_stream = state_of(NONE, Live(24), {"batch_size": 4})
    loader = DataLoader(rows(), batch_size=4)
    loader.load_state_dict(of_stream)
    with pytest.raises(ValueError, match="workers: the state is of an iterable dataset, list is"):
        iter(loader)
    loader = DataLoader(Live(24), batch_size=4)
    loader.load_state_dict(state_of(NONE, rows(), {"batch_size": 4}))
    with pytest.raises(ValueError, match="the state has 0 worker"), pytest.warns(match="Live"):
        iter(loader)


def test_a_damaged_origin_is_refused_by_name():
    """As every other field."""
    state = state_of(NONE, rows(), shuffled())
    for name, value in (("length", "x"), ("samplers", 3), ("ranks", 0), ("another", 1)):
        damaged = {**state, "made_by": {**state["made_by"], name: value}}
        with pytest.raises(ValueError, match=rf"made_by\.{name}"):
            DataLoader(rows()).load_state_dict(damaged)


# -- pipelines ---------------------------------------------------------------------------------


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
    again = pipeline(rows(8), str)
    again.load_state_dict(state)
    assert len(list(again)) == 7
    for other, what in (
        (pipeline(rows(9), str), "length 9, was 8"),
        (pipeline(rows(8, 1), str), "contents other"),
        (pipeline(rows(8), str, int), "stages"),
        (pipeline(tuple(rows(8)), str), "source 'tuple', was 'list'"),
    ):
        other.load_state_dict(state)
        with pytest.warns(UserWarning, match=f"PipelineDataset.load_state_dict: .*{what}"):
            list(other)


class Sizeless:
    """A source of unknown length."""

    def __init__(self, length):
        self.length = length

    def __iter__(self):
        return iter(range(self.length))


class AsyncSizeless(Sizeless):
    """The same for an event loop."""

    __iter__ = None

    async def __aiter__(self):
        for number in range(self.length):
            yield number


def odd(number):
    return number if number % 2 else None


@pytest.mark.parametrize(
    ("source", "ops"), [(Sizeless, []), (AsyncSizeless, []), (Sizeless, [odd])]
)
def test_a_pipeline_whose_source_ends_before_the_state_is_an_error(source, ops):
    """Skipped in the source, or made again to be thrown away."""
    dataset = pipeline(source(12), *ops)
    items = iter(dataset)
    for _ in range(5):
        next(items)
    state = dataset.state_dict()
    items.close()
    dataset = pipeline(source(3), *ops)
    dataset.load_state_dict(state)
    with pytest.raises((ValueError, ExceptionGroup)) as caught:
        list(dataset)
    errors = getattr(caught.value, "exceptions", (caught.value,))
    assert "resuming makes 5 item(s) of " in str(errors[0])
    assert "but it ended after" in str(errors[0])


# -- contents ----------------------------------------------------------------------------------

CONTAINERS = {
    "list": list,
    "tuple": tuple,
    "array": np.array,
    "tensor": torch.tensor,
    "rows": lambda values: TensorDataset(torch.tensor(values), torch.arange(len(values))),
    "subset": lambda values: Subset(values, range(len(values))),
    "pick": lambda values: Subset(range(2000), values),
    "joined": lambda values: ConcatDataset([values, values[:1]]),
    "source": ListSource,
    "pairs": lambda values: [(value, str(value)) for value in values],
}


@pytest.mark.parametrize("kind", CONTAINERS)
@settings(max_examples=30, deadline=None)
@given(values=st.lists(st.integers(0, 1000), min_size=2, max_size=40), data=st.data())
def test_contents_are_told_apart_by_their_first_and_last_values(kind, values, data):
    """The same values have the same sum; others at the ends have another one."""
    make = CONTAINERS[kind]
    assert contents_of(make(values)) == contents_of(make([*values])) is not None
    place = data.draw(st.sampled_from([0, -1]))
    changed = [*values]
    changed[place] += 1
    assert contents_of(make(changed)) != contents_of(make(values))


def test_contents_of_mixtures_and_groups_are_their_plans():
    """Seed, weights and budget decide what comes."""
    one, two = rows(40), rows(60, 100)
    mixtures = [
        mix({"one": one, "two": two}, weights={"one": share, "two": 1 - share}, seed=seed)
        for share, seed in ((0.5, 0), (0.5, 1), (0.9, 0))
    ]
    groups = [
        make(rows(40), budget, size_of=lambda number: 1 + number % 5, seed=seed)
        for make, budget, seed in ((pack, 8, 0), (pack, 8, 1), (bucket, 9, 0))
    ]
    sums = [contents_of(each) for each in (*mixtures, *groups)]
    assert len({*sums}) == len(sums)
    assert None not in sums
    again = mix({"one": one, "two": two}, weights={"one": 0.5, "two": 0.5}, seed=0)
    assert contents_of(again) == sums[0]


def test_contents_run_no_code_of_the_users():
    """An object with ``__getitem__`` may be slow, or draw random numbers."""

    class Slow:
        def __len__(self):
            raise AssertionError("nobody may ask")

        __getitem__ = __len__

    assert contents_of(Slow()) is None
    assert contents_of(Subset(Slow(), [0, 1])) is not None
    assert contents_of([Slow()]) is not None
    assert contents_of([]) is not None
    assert contents_of(RandomSampler(rows())) is None
