"""Resuming wherever the workers live, of datasets and samplers that keep more than a state says."""

from __future__ import annotations

import itertools
import json
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from _datasets import Deck, Drawn, DrawnStream, StatefulStream, Walk
from _loader_helpers import batches_of, resumed
from _seats import FORKED, NONE, THREADS, in_seats

from spdl_torch import DataLoader, PipelineDataset
from spdl_torch.data import mix
from spdl_torch.data.sources import as_source
from spdl_torch.pipeline import PipelineBuilder


def stored(loader):
    return json.loads(json.dumps(loader.state_dict()))


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


@pytest.mark.parametrize("order", ["shuffle", "deck"])
@in_seats(NONE, THREADS)
def test_what_came_ahead_is_known_to_a_second_state(seat, order):
    """A state that is loaded and saved again, at once or a few batches later, knows the batches
    that came before their turn, though they were not drawn again."""

    options = {"batch_size": 2, "seed": 1, "in_order": False}

    def make(kind):
        torch.manual_seed(4)
        orders = {
            "shuffle": {"shuffle": True, "generator": torch.Generator().manual_seed(6)},
            "deck": {"sampler": Deck(40)},
        }
        return kind(Drawn(40), **options, **orders[order])

    whole = batches_of(make(DataLoader))
    first = make(DataLoader)
    batches = iter(first)
    seen = batches_of(next(batches) for _ in range(2))
    state = stored(first)
    state["ahead"] = [1, 3, 4, 9]  # as if the batches before each were late
    seen += [whole[2 + number] for number in state["ahead"]]
    for num_batches in (0, 1, 3):
        loader = resumed(make(seat.loader), state)
        batches = iter(loader)
        seen += batches_of(next(batches) for _ in range(num_batches))
        state = stored(loader)
        batches = None
    loader = resumed(make(seat.loader), state)
    assert sorted(seen + batches_of(loader)) == sorted(whole)


class GoesOn:
    """A sampler that keeps its own state, never ends, and goes on in the next epoch."""

    def __init__(self):
        self.given = 0

    def __iter__(self):
        while True:
            self.given += 1
            yield self.given % 24

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state):
        self.given = state["given"]


class BeginsAnew(GoesOn):
    """One without a length whose epochs end, and begin at the beginning."""

    def __iter__(self):
        for self.given in range(1, 13):
            yield self.given


@pytest.mark.parametrize("options", [{"batch_size": 3}, {"batch_size": None}])
@pytest.mark.parametrize("sampler", [GoesOn, BeginsAnew])
@in_seats(NONE, THREADS)
def test_a_question_changes_no_epoch_after_a_break(seat, sampler, options):
    """Where the sampler goes on, and where it begins anew."""

    def epochs_of(*, asks):
        loader, epochs = seat.loader(list(range(24)), sampler=sampler(), **options), []
        if sampler is BeginsAnew:
            epochs.append(batches_of(loader))
        for _ in range(3):
            epoch = []
            for batch in loader:
                epoch += batches_of([batch])
                if asks:
                    loader.state_dict()
                if len(epoch) == 2:
                    break
            epochs.append(epoch)
        return epochs

    assert epochs_of(asks=True) == epochs_of(asks=False)


@pytest.mark.parametrize("num_batches", [0, 1])
def test_a_sampler_that_goes_on_resumes_in_its_second_epoch(num_batches):
    """Where its last one was left, before its first batch and after it."""
    loader = DataLoader(list(range(24)), 3, sampler=GoesOn())
    next(iter(loader))
    loader.state_dict()
    batches = iter(loader)
    batches_of(next(batches) for _ in range(num_batches))
    state = stored(loader)
    expected = batches_of(next(batches) for _ in range(4))
    again = resumed(DataLoader(list(range(24)), 3, sampler=GoesOn()), state)
    batches = iter(again)
    assert batches_of(next(batches) for _ in range(4)) == expected


def by_worker(seat, dataset, **options):
    generator = torch.Generator().manual_seed(3)
    return seat.loader(dataset(), 2, rng="worker", generator=generator, **options)


@pytest.mark.parametrize("dataset", [Drawn, StatefulStream])
@in_seats(THREADS, FORKED)
def test_streams_of_workers_repeat_no_number_after_a_resume(seat, dataset):
    """Nobody has the workers' generators: from each place their streams are others, as a warning
    says, and never those of the epoch's beginning again."""
    loader, seen = by_worker(seat, dataset), []
    loader.state_dict()
    warned = nullcontext()
    for num_batches in (2, 1, 9):
        with warned:
            batches = iter(loader)
        seen += [row for _ in range(num_batches) for row in next(batches).tolist()]
        state = stored(loader)
        loader, batches = by_worker(seat, dataset), None
        loader.load_state_dict(state)
        warned = pytest.warns(UserWarning, match='with rng="worker" the rest of this epoch draws')
    assert sorted(index for index, _ in seen) == list(range(24))
    assert len({number for _, number in seen}) == 24


@pytest.mark.parametrize(
    ("dataset", "num_batches"), [(Drawn, 0), (Drawn, 12), (DrawnStream, 0), (DrawnStream, 3)]
)
@in_seats(THREADS, FORKED)
def test_streams_of_workers_are_exact_where_they_begin_again(seat, dataset, num_batches):
    """Before the first batch; after the end; and where all items are made again."""
    loader = by_worker(seat, dataset)
    batches = iter(loader)
    seen = batches_of(next(batches) for _ in range(num_batches))
    if len(seen) == 12:
        assert next(batches, None) is None
    again = resumed(by_worker(seat, dataset), stored(loader))
    expected = batches_of(batches) or batches_of(loader)
    assert batches_of(again) == expected
