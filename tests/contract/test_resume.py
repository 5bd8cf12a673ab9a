"""Resuming, beside the histories: what a state counts, and what comes again."""

import warnings
from contextlib import nullcontext
from functools import partial
from itertools import islice

import pytest
import torch
from hypothesis import given, settings, strategies as st
from support.datasets import (
    Deck,
    Drawn,
    DrawnStream,
    Indices,
    Live,
    LiveIterators,
    MapData,
    Position,
    StatefulStream,
    StreamData,
)
from support.loaders import DataLoader, batches_of, epoch_of as events_of, frozen, resumed, stored
from support.seats import FORKED, NONE, ONE, THREADS, in_seats

from spdl_torch.testing import assert_resume_exact

none_or_threads = in_seats(NONE, THREADS)


def test_another_batch_size_goes_on_behind_the_same_sample():
    """The state counts samples; it only has to stand between two batches. A dataset that is too
    small is noticed by that, too, where the state does not name it."""

    def make(length, batch_size):
        generator = torch.Generator().manual_seed(5)
        return DataLoader(Indices(length), batch_size, shuffle=True, generator=generator)

    loader = make(24, 4)
    batches = iter(loader)
    next(batches), next(batches)
    state = loader.state_dict()
    assert torch.equal(torch.cat([*resumed(make(24, 2), state)]), torch.cat([*batches]))
    for odd in (make(24, 5), make(6, 4)):
        odd.load_state_dict({**state, "made_by": {}})
        with pytest.raises(ValueError, match=r"after 8 samples, (which is not between|but the)"):
            iter(odd)


class NotingStream(StatefulStream):
    """Notes the items that it makes."""

    made: list = []  # noqa: RUF012

    def make(self, item):
        self.made.append(item)
        return super().make(item)


def test_a_stateful_iterable_makes_nothing_twice():
    """Its state is asked for, so that what was handed out is not made again to be thrown away.

    Where the worker waits for a core, asking may look expensive: then the state says how many items
    came since it was asked, and no others are made again.
    """

    def make():
        return ONE.loader(NotingStream(40), 4)

    loader = make()
    loader.state_dict()  # from now on somebody wants states
    assert len([*islice(loader, 5)]) == 5
    state = loader.state_dict()
    loader.close()
    NotingStream.made.clear()
    batches_of(resumed(make(), state))
    (worker,) = state["workers"]
    assert min(NotingStream.made) == 20 - worker["num_after"]
    assert worker["num_after"] <= 16, "it was asked at least once"


class Counting(Drawn):
    """A map-style dataset that changes what it gives, and keeps count of it."""

    count = 0

    def __getitem__(self, index):
        self.count += 1
        return index, self.count

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def test_a_stateful_map_style_dataset_keeps_its_own_state():
    """If there is one of it: worker threads have a copy each."""
    assert_resume_exact(lambda: DataLoader(Counting(10), batch_size=3))
    assert DataLoader(Counting(10), num_workers=1).state_dict()["dataset"] is None


@in_seats(NONE, ONE)
@pytest.mark.parametrize("batch_size", [None, 2])
@pytest.mark.parametrize("kind", [MapData, StreamData])
def test_an_error_counts_as_handed_out(kind, batch_size, seat):
    """A loop that went on after a bad sample goes on after it when it resumes, too."""

    def make():
        return seat.loader(kind(8, {3: KeyError}), batch_size=batch_size)

    loader = make()
    batches = iter(loader)
    for _ in range(3 // (batch_size or 1)):
        next(batches)
    with pytest.raises(KeyError, match="bad 3"):
        next(batches)
    again = resumed(make(), loader.state_dict())
    assert events_of(again) == [frozen(batch) for batch in batches]


@settings(max_examples=40, deadline=None)
@given(
    dataset=st.sampled_from([Indices, Live, LiveIterators]),
    length=st.integers(0, 25),
    batch_size=st.integers(1, 6),
    drop_last=st.booleans(),
    seat=st.sampled_from([NONE, ONE]),
    stop=st.integers(0, 12),
    see_end=st.booleans(),
    was_asked=st.booleans(),
)
def test_torchdata_resumes_at_the_same_batch(
    dataset, length, batch_size, drop_last, seat, stop, see_end, was_asked
):
    """The rest, and the next epoch, equal StatefulDataLoader's, which asks a dataset for its state
    after every batch; an end that the loop saw begins the next epoch, one that it did not see
    leaves an empty tail."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    def items(batches):
        return [(batch if dataset is Indices else batch[:, 0]).tolist() for batch in batches]

    def history(make):
        loader, again = (
            make(dataset(length), batch_size, drop_last=drop_last and dataset is Indices)
            for _ in range(2)
        )
        if was_asked:
            loader.state_dict()
        iterator = iter(loader)
        taken = [next(iterator, None) is not None for _ in range(stop)]
        rest = items(iterator) if see_end else []
        resumed(again, stored(loader))
        return taken, rest, items(again), items(again)

    with warnings.catch_warnings(action="ignore"):
        expected = history(StatefulDataLoader)
    assert history(seat.loader) == expected


@pytest.mark.parametrize("order", ["shuffle", "deck"])
@none_or_threads
def test_what_came_ahead_is_known_to_a_second_state(seat, order):
    """A state that is loaded and saved again, at once or a few batches later, knows the batches
    that came before their turn, though they were not drawn again."""

    def make(kind):
        torch.manual_seed(4)
        own = {"shuffle": True, "generator": torch.Generator().manual_seed(6)}
        own = own if order == "shuffle" else {"sampler": Deck(40)}
        return kind(Drawn(40), 2, seed=1, in_order=False, **own)

    whole, loader = batches_of(make(DataLoader)), make(DataLoader)
    seen = batches_of(islice(loader, 2))
    state = stored(loader)
    state["ahead"] = [1, 3, 4, 9]  # as if the batches before each were late
    seen += [whole[2 + number] for number in state["ahead"]]
    for num_batches in (0, 1, 3, None):
        loader = resumed(make(seat.loader), state)
        batches = iter(loader)
        seen += batches_of(islice(batches, num_batches))
        state = stored(loader)
    assert sorted(seen) == sorted(whole)


def by_worker(seat, dataset, **options):
    generator = torch.Generator().manual_seed(3)
    return seat.loader(dataset(), 2, rng="worker", generator=generator, **options)


@pytest.mark.parametrize("dataset", [Drawn, StatefulStream])
@in_seats(THREADS, FORKED)
def test_streams_of_workers_begin_again_after_a_resume(seat, dataset):
    """Nobody has the workers' generators, as a warning says."""
    loader, seen = by_worker(seat, dataset), []
    loader.state_dict()
    warned = nullcontext()
    for num_batches in (2, 1, 9):
        with warned:
            batches = iter(loader)
        seen += [row for batch in batches_of(islice(batches, num_batches)) for row in batch]
        state = stored(loader)
        loader, batches = by_worker(seat, dataset), None
        loader.load_state_dict(state)
        warned = pytest.warns(UserWarning, match='with rng="worker" the rest of this epoch draws')
    assert sorted(index for index, _ in seen) == list(range(24))


@pytest.mark.parametrize(
    ("dataset", "num_batches"), [(Drawn, 0), (Drawn, 12), (DrawnStream, 0), (DrawnStream, 3)]
)
@in_seats(THREADS, FORKED)
def test_streams_of_workers_are_exact_where_they_begin_again(seat, dataset, num_batches):
    """Before the first batch; after the end; and where all items are made again."""
    loader = by_worker(seat, dataset)
    batches = iter(loader)
    assert num_batches <= len(batches_of(islice(batches, num_batches)))
    if num_batches == 12:
        assert next(batches, None) is None
    again = resumed(by_worker(seat, dataset), stored(loader))
    expected = batches_of(batches) or batches_of(loader)
    assert batches_of(again) == expected


@pytest.mark.parametrize("length", [0, 2, 6, 17])
def test_assert_resume_exact_agrees(length):
    """The shipped check finds nothing to complain of: with another number of workers, and in epochs
    of few batches or none."""
    make, other = (partial(seat.loader, Drawn(length), 4) for seat in (THREADS, NONE))
    assert_resume_exact(make, make_resumed=other)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"load_state_dict": lambda *_: None}, "resumed in epoch 0 after batch 1, epoch 0, batch"),
        ({"state_dict": lambda _: {"seen": {1, 2}}}, "must be made of what JSON can hold"),
    ],
)
def test_assert_resume_exact_tells_what_is_wrong(wrong, told):
    """From which state, and where."""
    sampler = type("Wrong", (Position,), wrong)
    with pytest.raises(AssertionError, match=told):
        assert_resume_exact(lambda: DataLoader(Drawn(12), 3, sampler=sampler(12)))
