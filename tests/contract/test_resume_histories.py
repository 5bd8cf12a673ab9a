"""Random histories of a run: stopped, resumed elsewhere, killed; what comes is as if nothing had
been. The undisturbed run is the oracle: of every kind of dataset and order, in every backend."""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
from collections import Counter
from functools import partial
from itertools import islice
from time import monotonic
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings, strategies as st
from support.datasets import (
    BulkDrawn,
    Deck,
    Drawn,
    DrawnStream,
    Endless,
    GoingOn,
    Live,
    LiveIterators,
    Position,
    Shuffled,
    StatefulStream,
    WalkWithState,
)
from support.fuzz import QUICK
from support.inside import children_of
from support.seats import FORKED, NONE, ONE, SERVED, SPAWNED, THREADS, Seat
from torch.utils.data import BatchSampler, RandomSampler, WeightedRandomSampler

from spdl_torch import DataLoader, PipelineDataset
from spdl_torch.data import mix
from spdl_torch.data.sources import ListSource, as_source
from spdl_torch.pipeline import PipelineBuilder

pytestmark = pytest.mark.timeout(600)  # 20 s here; room for a slow machine

LENGTH = 23


class Reusing(Position):
    """A batch sampler that keeps its own state and yields one list, changed in between."""

    def __iter__(self):
        batch = [0, 0, 0]
        for index in super().__iter__():
            batch[:] = [index] * 3
            yield batch


def pipeline(source, **options):
    return PipelineDataset(PipelineBuilder().add_source(source).add_sink(), **options)


def mixture(stop):
    sources = {"a": ListSource(range(8)), "b": as_source(partial(iter, range(100, 108)))}
    return pipeline(mix(sources, stop=stop))


MAP_STYLE = {"map": Drawn, "bulk": BulkDrawn}
ITERABLE = {
    "counted": Shuffled,
    "drawn": DrawnStream,
    "live": Live,
    "live iterators": LiveIterators,
    "walk": WalkWithState,
    "stateful": StatefulStream,
    "endless": lambda _: Endless(),
    "pipeline": lambda length: pipeline(ListSource(range(length)).shuffle(1)),
    "mixture": lambda _: mixture("first"),
    "mixture to the last end": lambda _: mixture("all"),
    "source with a state": lambda _: pipeline(GoingOn(LENGTH)),
    "a loader as a source": lambda _: pipeline(
        DataLoader(range(LENGTH), None, shuffle=True, generator=torch.Generator().manual_seed(3))
    ),
    "a rank's source with a state": lambda _: pipeline(GoingOn(LENGTH), num_replicas=2, rank=1),
}
LASTING = {"endless", *(kind for kind in ITERABLE if "pipeline" in kind or "source" in kind)}
LASTING |= {"mixture", "mixture to the last end", "walk"}
"""Of these each epoch is another one; it is known where a state was asked for before."""
ORDERS = {
    "none": lambda own: {},
    "shuffle": lambda own: {"shuffle": True},
    "position": lambda own: {"sampler": Position(LENGTH)},
    "deck": lambda own: {"sampler": Deck(LENGTH)},
    "replacement": lambda own: {
        "sampler": RandomSampler(range(LENGTH), replacement=True, num_samples=30, generator=own)
    },
    "weighted": lambda own: {
        "sampler": WeightedRandomSampler(range(1, LENGTH + 1), LENGTH, generator=own)
    },
    "batches": lambda own: {
        "batch_sampler": BatchSampler(RandomSampler(range(LENGTH), generator=own), 3, False)
    },
    "deck in batches": lambda own: {"batch_sampler": BatchSampler(Deck(LENGTH), 4, False)},
    "one list": lambda own: {"batch_sampler": Reusing(12)},
    "uneven": lambda own: {"batch_sampler": [[0, 1], [2], [3, 4, 5, 6], [7]]},
}
REPLACED = (FORKED, SERVED, SPAWNED)
"""Where several processes make samples: one that is killed is replaced."""


class Event(NamedTuple):
    """What happens after some more batches."""

    num_batches: int
    what: str
    """``elsewhere``: another loader goes on; ``same``: this one does, from its own state;
    ``twice``: as elsewhere, from the state of a loader in between; ``kill``: a worker process."""
    seat: Seat


class History(NamedTuple):
    """A run of some epochs."""

    kind: str
    order: str
    batch_size: int | None
    drop_last: bool
    in_order: bool
    persistent: bool
    asked: bool
    seed: int | None
    has_generator: bool
    """Whether the order follows from a generator of the loader's, or from torch's global one, which
    the program restores beside the loader."""
    seat: Seat
    epochs: list[list[Event]]

    def make(self, seat: Seat, *, in_order: bool | None = None) -> Any:
        """The loader in a seat, and in the order of the history where none is given."""
        options: dict[str, Any] = {"seed": self.seed, "batch_size": self.batch_size}
        if self.batch_size is not None:
            options["drop_last"] = self.drop_last
        if self.persistent:
            options["persistent_workers"] = True
        if self.has_generator:
            options["generator"] = torch.Generator().manual_seed(8)
        if self.kind in ITERABLE:
            return seat.loader(ITERABLE[self.kind](LENGTH), **options)
        options |= ORDERS[self.order](options.get("generator"))
        if "batch_sampler" in options:
            del options["batch_size"]
            options.pop("drop_last", None)
        options["in_order"] = self.in_order if in_order is None else in_order
        return seat.loader(MAP_STYLE[self.kind](LENGTH), **options)


def num_parts(kind, seat):
    """The number of parts of an iterable; of one whose epochs differ, in a seat that keeps it."""
    return seat.num_workers if kind in LASTING else max(1, seat.num_workers)


@st.composite
def histories(draw, seats, whats):
    """Of loaders whose states fit each other."""
    kind = draw(st.sampled_from([*MAP_STYLE] * 4 + [*ITERABLE]))  # those have many orders
    persistent = draw(st.booleans())
    open_seats = [seat for seat in seats if seat is not NONE or not persistent]
    seat = draw(st.sampled_from(open_seats))
    if kind in ITERABLE:  # each of its workers has its part
        open_seats = [each for each in open_seats if num_parts(kind, each) == num_parts(kind, seat)]
    events = st.builds(
        Event, st.integers(0, 5), st.sampled_from(whats), st.sampled_from(open_seats)
    )
    return History(
        kind=kind,
        order=draw(st.sampled_from(sorted(ORDERS))),
        batch_size=draw(st.none() | st.integers(1, 5)),
        drop_last=draw(st.booleans()),
        in_order=draw(st.booleans()) or kind in ITERABLE,
        persistent=persistent,
        asked=draw(st.booleans()) or kind in LASTING,
        seed=draw(st.sampled_from([None, 3])),
        has_generator=draw(st.booleans()),
        seat=seat,
        epochs=draw(st.lists(st.lists(events, max_size=5), min_size=1, max_size=3)),
    )


def undisturbed(history):
    """The epochs that have to come, from threads or from no workers at all."""
    has_workers = history.persistent or (history.kind in ITERABLE and history.seat is not NONE)
    torch.manual_seed(6)
    workers = ONE if history.seat is ONE else THREADS
    loader = history.make(workers if has_workers else NONE, in_order=True)
    return [taken(iter(loader), None) for _ in history.epochs]


def played(history, lengths, done):
    """The epochs that came."""
    torch.manual_seed(6)
    loader, seat, epochs = history.make(history.seat), history.seat, []
    if history.asked:
        loader.state_dict()
    for length, events in zip(lengths, history.epochs, strict=True):
        batches, got = iter(loader), []
        for event in events:
            got += taken(batches, min(event.num_batches, length - len(got)))
            if event.what == "kill":
                done["kill"] += seat in REPLACED and history.kind in MAP_STYLE and kill(batches)
                continue
            done[event.what] += 1
            batches, (state, rng) = None, stored(loader)
            if event.what != "same":
                loader, seat = history.make(event.seat), event.seat
            else:
                state = SAVED[-1][0]  # itself: loading it is not to change it either
            batches = resumed(history, loader, state, rng)
            if event.what == "twice":
                got += taken(batches, min(1, length - len(got)))
                batches, (state, rng) = None, stored(loader)
                loader = history.make(event.seat)
                batches = resumed(history, loader, state, rng)
        got += taken(batches, None)
        epochs.append(got)
    return epochs


def resumed(history, loader, state, rng):
    """Its iterator, from a state. What torch's global generator stands at is no matter to a loader
    with a generator of its own; other programs restore it beside the loader."""
    if history.has_generator:
        torch.manual_seed(123)
        rng = torch.get_rng_state()
    torch.set_rng_state(rng)
    loader.load_state_dict(state)
    assert loader.state_dict() == state, "until iter(), the state is what was loaded"
    assert torch.equal(torch.get_rng_state(), rng), "loading a state draws nothing"
    batches = iter(loader)
    if history.has_generator and state["num_samples"] and not state["finished"]:
        assert torch.equal(torch.get_rng_state(), rng), "nor does going on in an epoch"
    return batches


def taken(batches, count):
    return [torch.as_tensor(batch).tolist() for batch in islice(batches, count)]


def stored(loader):
    """Its state, as JSON has it, which what goes on is not to change."""
    state = loader.state_dict()
    text = json.dumps(state, allow_nan=False)
    SAVED.append((state, text))
    return json.loads(text), torch.get_rng_state()


SAVED: list[tuple[Any, str]] = []


def kill(batches):
    """Kill one worker process of this iterator."""
    child = next(iter(children_of(batches).values()))
    if not child.pid:
        return False
    os.kill(child.pid, signal.SIGKILL)
    return True


def check(history, done):
    expected = undisturbed(history)
    SAVED.clear()
    got = played(history, [len(epoch) for epoch in expected], done)
    assert all(json.dumps(state) == text for state, text in SAVED), "a state has changed"
    done["histories"] += 1
    done[str(history.seat)] += 1
    if not history.in_order:
        expected, got = ([sorted(epoch) for epoch in epochs] for epochs in (expected, got))
    assert got == expected


def told(kind, seat, *epochs, persistent=False, in_order=True, order="deck"):
    """A history for certain, whatever else is drawn."""
    events = [[Event(*event) for event in epoch] for epoch in epochs]
    return History(kind, order, 3, False, in_order, persistent, True, None, True, seat, events)


KILLED = told("bulk", FORKED, [(2, "kill", NONE), (1, "twice", FORKED), (2, "kill", NONE)])
LEFT = told("map", THREADS, [(4, "twice", FORKED), (1, "same", NONE)], [], in_order=False)
UNBEGUN = told("map", NONE, [], [(0, "elsewhere", NONE)], order="position")
STAYED = told("live iterators", FORKED, [], [(1, "elsewhere", THREADS)], [], persistent=True)
SERVED_ONES = told("bulk", SERVED, [(2, "kill", NONE), (1, "elsewhere", THREADS)], in_order=False)
PLACED = told("live iterators", SERVED, [(2, "elsewhere", SERVED)], [], persistent=True)
APART = [
    told(kind, seat, [(2, "same", seat), (2, "elsewhere", seat)], [(1, "same", seat)], [], **more)
    for kind in ("live", "live iterators", "endless", "walk", "a loader as a source")
    for seat, more in ((NONE, {}), (THREADS, {"persistent": True}))
]
WENT_ON = told("endless", THREADS, [(3, "same", NONE)], [(1, "twice", FORKED)], persistent=True)
WALKED = told("walk", FORKED, [(3, "same", NONE)], [], persistent=True)


def run(seats, whats, settled, certain=()):
    """What was done in histories that lose and change nothing: in those that are certain, and in
    some that are drawn."""
    done: Counter[str] = Counter()

    @settings(settled)
    @given(histories(seats, whats))
    def check_one(history):
        check(history, done)

    gc.collect()
    for history in certain:
        check(history, done)
    check_one()
    return done


WITHOUT_KILLS = ("elsewhere", "twice", "same")


def test_histories_lose_and_change_nothing():
    """No sample is lost, comes twice or has other random bits, and later epochs follow; without
    workers and on threads."""
    settled = settings(QUICK, max_examples=45)
    done = run((NONE, THREADS, ONE), WITHOUT_KILLS, settled, (UNBEGUN, *APART))
    assert min(done[what] for what in WITHOUT_KILLS) > 10


def test_histories_lose_and_change_nothing_when_workers_are_processes(caplog):
    """The same from and to processes, some of which are killed."""
    caplog.set_level(logging.ERROR, "spdl_torch.data")
    certain = (KILLED, LEFT, STAYED, WENT_ON, WALKED, SERVED_ONES, PLACED)
    settled = settings(QUICK, max_examples=12)
    done = run((FORKED, NONE, THREADS), ("kill", *WITHOUT_KILLS), settled, certain)
    assert done["kill"] >= 3
    assert done["twice"] >= 3


@pytest.mark.long
def test_histories_lose_and_change_nothing_for_long(long_seconds, caplog):
    """The same for other histories in every run, until the time is over."""
    caplog.set_level(logging.ERROR, "spdl_torch.data")
    settled = settings(QUICK, derandomize=False, database=None, max_examples=25)
    done, end = Counter(), monotonic() + long_seconds
    while monotonic() < end:
        done += run((*REPLACED, NONE, THREADS), ("kill", *WITHOUT_KILLS), settled)
    print(dict(sorted(done.items())))
