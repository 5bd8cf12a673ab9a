"""Resuming wherever the workers live: the rest of the epoch, and what follows, as if nothing had
been."""

from __future__ import annotations

import itertools
import json
import logging
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from _datasets import (
    Deck,
    Drawn,
    Live,
    Nested,
    Position,
    Rows,
    SteppedOver,
    Walk,
    WalkWithState,
    indices_alone,
)
from _loader_helpers import no_thread_left
from _seats import (
    FORKED,
    NONE,
    THREADS,
    in_every_seat,
    in_every_seat_by_pairs,
    in_seats,
)
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, get_worker_info

from spdl_torch import DataLoader, PipelineDataset
from spdl_torch.data import mix
from spdl_torch.data.sources import as_source
from spdl_torch.pipeline import PipelineBuilder

__all__ = ["no_thread_left"]


def plain(batches):
    return [batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in batches]


def stored(loader):
    return json.loads(json.dumps(loader.state_dict()))


def epochs_of(make, num_epochs):
    loader = make()
    return [plain(loader) for _ in range(num_epochs)]


def resumed_from(make, epoch, num_batches, num_epochs, asked=False):
    """The epochs of a loader that stopped after some batches, or before ``iter()`` (None), and of
    the one that went on."""
    loader, epochs = make(), []
    if asked:
        loader.state_dict()
    epochs += [plain(loader) for _ in range(epoch)]
    begun = []
    if num_batches is not None:
        batches = iter(loader)
        begun = plain(next(batches) for _ in range(num_batches))
    state, rng = stored(loader), torch.get_rng_state()
    batches = None
    again = make()
    again.load_state_dict(state)
    torch.set_rng_state(rng)
    epochs.append(begun + plain(again))
    return epochs + [plain(again) for _ in range(num_epochs - len(epochs))]


ORDERS = {
    "shuffle": lambda data: {"shuffle": True},
    "generator": lambda data: {"shuffle": True, "generator": torch.Generator().manual_seed(1)},
    "sampler": lambda data: {"sampler": RandomSampler(data, replacement=True)},
    "position": lambda data: {"sampler": Position(len(data))},
    "deck": lambda data: {"sampler": Deck(len(data))},
    "batches": lambda data: {"batch_sampler": BatchSampler(Deck(len(data)), 4, False)},
}


@in_every_seat
def test_later_epochs_are_those_that_would_have_come(seat):
    """With torch's generator restored, from a state after ``iter()`` and before the first batch."""
    check_later_epochs(seat, "shuffle", [(0, 0)])


@pytest.mark.parametrize("order", ORDERS)
@in_seats(NONE, THREADS)
def test_later_epochs_follow_in_any_order(seat, order):
    """From a state before the epoch, before its first batch, in the middle and after the last one;
    with samplers that keep a state, too."""
    check_later_epochs(seat, order, [(0, None), (0, 0), (1, 0), (1, 2), (0, 6)])


def check_later_epochs(seat, order, stops):
    def make():
        data = Drawn()
        options = ORDERS[order](data)
        if "batch_sampler" not in options:
            options["batch_size"] = 4
        return seat.loader(data, **options)

    def run(*stop):
        torch.manual_seed(1)
        return epochs_of(make, 3) if not stop else resumed_from(make, *stop, 3)

    expected = run()
    for stop in stops:
        assert run(*stop) == expected, stop


@in_every_seat_by_pairs(dataset=[SteppedOver, Live], persistent=[False, True])
def test_iterables_go_on_whether_their_workers_stay_or_not(seat, dataset, persistent):
    """An iterator's state ends with its epoch; a dataset's is the next one's beginning. So from the
    second epoch on, before every worker has given a batch."""

    def make():
        return seat.loader(dataset(16), batch_size=2, seed=2, persistent_workers=persistent)

    expected = epochs_of(make, 3)
    for stop in [(1, 1)] if seat.pickles else [(1, 0), (1, 1), (0, 8)]:
        assert resumed_from(make, *stop, 3, asked=True) == expected, stop


@in_every_seat
def test_loading_into_the_same_loader_is_as_into_a_new_one(seat, caplog):
    """Persistent workers have gone on with a dataset that keeps its position: they begin anew,
    since the state, the first one, counts what they gave from their beginning on."""
    loader = seat.loader(WalkWithState(), batch_size=1, persistent_workers=True)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    with caplog.at_level(logging.ERROR, "spdl_torch.data"):
        state = stored(loader)
    rest = plain(batches)
    loader.load_state_dict(state)
    assert plain(loader) == rest
    assert len(rest) == 9


@in_every_seat
def test_an_iterable_that_ends_before_the_state_is_an_error(seat):
    """Its items are counted; fewer than were handed out cannot be passed over."""
    loader = seat.loader(Walk(12), batch_size=2)
    batches = iter(loader)
    for _ in range(4):
        next(batches)
    state = stored(loader)
    del batches
    again = seat.loader(Walk(4), batch_size=2)
    again.load_state_dict(state)
    match = r"num_items: resuming makes \d+ item\(s\) of Walk again, .* but it ended after \d\."
    with pytest.raises(ValueError, match=match):
        list(again)


@pytest.mark.parametrize("dataset", [Walk, WalkWithState])
@in_seats(NONE, THREADS, FORKED)
def test_no_worker_and_one_are_alike_to_an_iterable(seat, dataset):
    """A state of either resumes in the other."""
    one = {} if seat is NONE else {"num_workers": 1}
    for then, now in ((NONE, seat), (seat, NONE)):
        run, again = (
            each.loader(dataset(12), batch_size=2, seed=3, **(one if each is seat else {}))
            for each in (then, now)
        )
        run.state_dict()
        batches = iter(run)
        next(batches)
        again.load_state_dict(stored(run))
        assert plain(again) == plain(batches)


@dataclass
class Numbers:
    """A source of unknown length, which begins anywhere."""

    length: int

    def __iter__(self):
        return self.iterate()

    def iterate(self, start=0):
        return iter(range(start, self.length))


SHORTER = {
    "list": range,
    "begins anywhere": Numbers,
    "stream": lambda length: as_source(partial(iter, range(length))),
    "shuffled": lambda length: as_source(partial(iter, range(length))).shuffle(1, 3),
    "mixture": lambda length: mix(
        {name: as_source(partial(iter, range(length))) for name in ("one", "two")}
    ),
}


@pytest.mark.filterwarnings("ignore:PipelineDataset.load_state_dict")  # its length is another
@pytest.mark.parametrize("source", SHORTER)
@in_every_seat
def test_a_pipeline_whose_source_ends_before_the_state_is_an_error(seat, source):
    """Whether the source knows its length, or has to be asked for an item; one that ends where the
    state stands is right, and its epoch is over."""

    def loader_of(length):
        builder = PipelineBuilder().add_source(SHORTER[source](length))
        builder.aggregate(2, drop_last=True)
        dataset = PipelineDataset(builder.add_sink(), num_replicas=1, rank=0)
        return seat.loader(dataset, batch_size=None)

    def rest(length, state):
        loader = loader_of(length)
        loader.load_state_dict(state)
        return list(loader)

    loader = loader_of(16)
    loader.state_dict()
    *_, state = [stored(loader) for _ in loader]
    assert rest(16, state) == []
    # A state that takes long is taken less often, and has the items since beside it.
    match = r"(num_source|num_after): resuming makes .* but it ended after"
    with pytest.raises(ValueError, match=match):
        rest(4, state)


def test_without_workers_a_dataset_that_goes_on_without_a_state_is_an_error():
    """It is the same object, and has gone on since."""
    loader = DataLoader(Walk(12), batch_size=2)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    list(batches)
    loader.load_state_dict(state)
    with pytest.raises(ValueError, match=r"workers\[0\]\.num_items: resuming makes 2 item"):
        iter(loader)


def test_items_since_a_state_are_counted_as_well():
    """A state that is asked for now and then has the items since beside it."""
    loader = DataLoader(WalkWithState(12), batch_size=2)
    batches = iter(loader)
    next(batches)
    state = stored(loader)
    state["workers"][0] |= {"num_items": 40, "num_after": 38}
    loader.load_state_dict(state)
    with pytest.raises(ValueError, match=r"workers\[0\]\.num_after: resuming makes 38 item"):
        iter(loader)


# -- out of order ------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["shuffle", "deck"])
@in_seats(NONE, THREADS, FORKED)
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

    whole = plain(make(DataLoader))
    first = make(DataLoader)
    batches = iter(first)
    seen = plain(next(batches) for _ in range(2))
    state = stored(first)
    state["ahead"] = [1, 3, 4, 9]  # as if the batches before each were late
    seen += [whole[2 + number] for number in state["ahead"]]
    for num_batches in (0, 1, 3):
        loader = make(seat.loader)
        loader.load_state_dict(state)
        batches = iter(loader)
        seen += plain(next(batches) for _ in range(num_batches))
        state = stored(loader)
        batches = None
    loader = make(seat.loader)
    loader.load_state_dict(state)
    assert sorted(seen + plain(loader)) == sorted(whole)


class Reusing:
    """A batch sampler that keeps its own state and yields one list, changed in between."""

    def __init__(self):
        self.position = 0

    def __iter__(self):
        batch = [0, 0, 0]
        while self.position < 4:
            batch[:] = range(3 * self.position, 3 * self.position + 3)
            self.position += 1
            yield batch
        self.position = 0

    def __len__(self):
        return 4

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


@in_every_seat
@pytest.mark.parametrize("taken_at", [0, 1, 2])
def test_a_list_that_a_stateful_sampler_reuses_is_kept_as_it_was(seat, taken_at):
    """The running loop, its state and a second one of that have each batch once."""
    expected = [[3 * n, 3 * n + 1, 3 * n + 2] for n in range(4)]
    first = seat.loader(Rows(12), batch_sampler=Reusing(), collate_fn=indices_alone)
    batches = iter(first)
    seen = [next(batches) for _ in range(taken_at)]
    state = first.state_dict()
    assert [*seen, *batches] == expected
    for _ in range(2):
        second = seat.loader(Rows(12), batch_sampler=Reusing(), collate_fn=indices_alone)
        second.load_state_dict(state)
        batches = iter(second)
        state = second.state_dict()
        assert [*batches] == expected[taken_at:]


@pytest.mark.parametrize("sampler", [Position, Deck])
@in_seats(NONE, THREADS)
def test_an_epoch_resumed_after_each_batch_ends_with_its_samplers_length(seat, sampler):
    """Once restored, a sampler that has given its last index would begin another order."""
    expected, got, state = plain(seat.loader(list(range(12)), 3, sampler=sampler(12))), [], None
    for _ in range(5):
        loader = seat.loader(list(range(12)), 3, sampler=sampler(12))
        if state is not None:
            loader.load_state_dict(state)
        got += plain(itertools.islice(loader, 1))
        state = stored(loader)
    assert got == expected


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
            epochs.append(plain(loader))
        for _ in range(3):
            epoch = []
            for batch in loader:
                epoch += plain([batch])
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
    plain(next(batches) for _ in range(num_batches))
    state = stored(loader)
    expected = plain(next(batches) for _ in range(4))
    again = DataLoader(list(range(24)), 3, sampler=GoesOn())
    again.load_state_dict(state)
    batches = iter(again)
    assert plain(next(batches) for _ in range(4)) == expected


# -- the workers' own streams ------------------------------------------------------------------


class DrawnItems(IterableDataset):
    """Items show what they drew; each worker has its share."""

    def __iter__(self):
        return (Drawn()[index] for index in range(get_worker_info().id, 24, 2))


class DrawnItemsWithState(DrawnItems):
    """The same, from where it was."""

    given = 0

    def __iter__(self):
        for index in range(get_worker_info().id + 2 * self.given, 24, 2):
            self.given += 1
            yield Drawn()[index]

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state):
        self.given = state["given"]


def by_worker(seat, dataset, **options):
    generator = torch.Generator().manual_seed(3)
    return seat.loader(dataset(), 2, rng="worker", generator=generator, **options)


@pytest.mark.parametrize("dataset", [Drawn, DrawnItemsWithState])
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
    ("dataset", "num_batches"), [(Drawn, 0), (Drawn, 12), (DrawnItems, 0), (DrawnItems, 3)]
)
@in_seats(THREADS, FORKED)
def test_streams_of_workers_are_exact_where_they_begin_again(seat, dataset, num_batches):
    """Before the first batch; after the end; and where all items are made again."""
    loader = by_worker(seat, dataset)
    batches = iter(loader)
    seen = plain(next(batches) for _ in range(num_batches))
    if len(seen) == 12:
        assert next(batches, None) is None
    again = by_worker(seat, dataset)
    again.load_state_dict(stored(loader))
    expected = plain(batches) or plain(loader)
    assert plain(again) == expected


@in_every_seat
def test_a_loader_within_a_dataset_is_resumed_exactly(seat):
    """Its order is drawn from the sample's stream, not from the trainer's generator."""
    before = torch.get_rng_state()
    batches = [*seat.loader(Nested(4), 2)]
    assert all(torch.equal(*batch) for batch in batches)
    assert not torch.equal(batches[0][0][0], batches[0][0][1])
    torch.empty((), dtype=torch.int64).random_()
    after = torch.get_rng_state()
    torch.set_rng_state(before)
    torch.empty(2, dtype=torch.int64).random_()
    assert torch.equal(torch.get_rng_state(), after)
