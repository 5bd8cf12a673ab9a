"""Random histories of a run: stopped, resumed elsewhere, killed; what comes is as if nothing had
been."""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
from collections import Counter
from itertools import islice
from time import monotonic
from typing import Any, NamedTuple

import pytest
import torch
from _datasets import BulkDrawn, Deck, Drawn, Endless, Live, Position, Shuffled, SteppedOver
from _fuzz import QUICK
from _inside import children_of
from _loader_helpers import no_thread_left
from _seats import FORKED, NONE, SERVED, SPAWNED, THREADS, Seat
from hypothesis import example, given, settings, strategies as st

__all__ = ["no_thread_left"]

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


MAP_STYLE = {"map": Drawn, "bulk": BulkDrawn}
ITERABLE = {"live": Live, "steps": SteppedOver, "endless": Endless, "counted": Shuffled}
SEATS = (FORKED, NONE, THREADS)
ALL_SEATS = (*SEATS, SERVED, SPAWNED)
"""Workers that import torch take seconds: a few in the short form, the others in the long one."""
REPLACED = (FORKED, SERVED, SPAWNED)
"""The seats in which several processes make samples: one that is killed is replaced."""


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
    batch_size: int
    in_order: bool
    persistent: bool
    asked: bool
    seed: int | None
    seat: Seat
    epochs: list[list[Event]]

    def make(self, seat: Seat, *, in_order: bool | None = None) -> Any:
        """The loader in a seat, and in the order of the history where none is given."""
        options: dict[str, Any] = {"seed": self.seed, "batch_size": self.batch_size}
        if self.persistent:
            options["persistent_workers"] = True
        generator = torch.Generator().manual_seed(8)
        if self.kind in ITERABLE:
            dataset = ITERABLE[self.kind]() if self.kind != "steps" else SteppedOver(23)
            return seat.loader(dataset, generator=generator, **options)
        orders = {
            "none": {},
            "shuffle": {"shuffle": True},
            "position": {"sampler": Position(23)},
            "deck": {"sampler": Deck(23)},
        }
        options |= orders[self.order]
        options["in_order"] = self.in_order if in_order is None else in_order
        return seat.loader(MAP_STYLE[self.kind](23), generator=generator, **options)


@st.composite
def histories(draw, seats=SEATS):
    """Of loaders whose states fit each other."""
    kind = draw(st.sampled_from([*MAP_STYLE, *ITERABLE]))
    persistent = draw(st.booleans())
    open_seats = [seat for seat in seats if seat is not NONE or not persistent]
    seat = draw(st.sampled_from(open_seats))
    if kind in ITERABLE:  # each of its workers has its part
        open_seats = [each for each in open_seats if each.num_workers == seat.num_workers]
    events = st.builds(
        Event,
        st.integers(0, 5),
        st.sampled_from(["kill", "elsewhere", "twice", "same"]),
        st.sampled_from(open_seats),
    )
    return History(
        kind=kind,
        order=draw(st.sampled_from(["none", "shuffle", "position", "deck"])),
        batch_size=draw(st.integers(1, 5)),
        in_order=draw(st.booleans()) or kind in ITERABLE,
        persistent=persistent,
        asked=draw(st.booleans()) or kind == "endless",
        seed=draw(st.sampled_from([None, 3])),
        seat=seat,
        epochs=draw(st.lists(st.lists(events, max_size=3), min_size=1, max_size=3)),
    )


def undisturbed(history):
    """The epochs that have to come, from threads or from no workers at all."""
    has_workers = history.persistent or (history.kind in ITERABLE and history.seat is not NONE)
    loader = history.make(THREADS if has_workers else NONE, in_order=True)
    return [[batch.tolist() for batch in loader] for _ in history.epochs]


def played(history, done):
    """The epochs that came."""
    loader, seat, epochs = history.make(history.seat), history.seat, []
    if history.asked:
        loader.state_dict()
    lengths = [len(epoch) for epoch in undisturbed(history)]
    for length, events in zip(lengths, history.epochs, strict=True):
        batches, got = iter(loader), []
        for event in events:
            got += taken(batches, min(event.num_batches, length - len(got)))
            if event.what == "kill":
                done["kill"] += seat in REPLACED and history.kind in MAP_STYLE and kill(batches)
                continue
            done[event.what] += 1
            state = stored(loader)
            batches = None
            if event.what != "same":
                loader, seat = history.make(event.seat), event.seat
            loader.load_state_dict(state)
            batches = iter(loader)
            if event.what == "twice":
                got += taken(batches, min(1, length - len(got)))
                state = stored(loader)
                batches = None
                loader = history.make(event.seat)
                loader.load_state_dict(state)
                batches = iter(loader)
        got += taken(batches, None)
        epochs.append(got)
    return epochs


def taken(batches, count):
    return [batch.tolist() for batch in islice(batches, count)]


def stored(loader):
    return json.loads(json.dumps(loader.state_dict()))


def kill(batches):
    """Kill one worker process of this iterator."""
    child = next(iter(children_of(batches).values()))
    if not child.pid:
        return False
    os.kill(child.pid, signal.SIGKILL)
    return True


def check(history, done):
    expected, got = undisturbed(history), played(history, done)
    done["histories"] += 1
    done[str(history.seat)] += 1
    if not history.in_order:
        expected, got = ([sorted(epoch) for epoch in epochs] for epochs in (expected, got))
    assert got == expected


def told(kind, seat, *epochs, persistent=False, in_order=True):
    """A history for certain, whatever else is drawn."""
    events = [[Event(*event) for event in epoch] for epoch in epochs]
    return History(kind, "deck", 3, in_order, persistent, True, None, seat, events)


KILLED = told("bulk", FORKED, [(2, "kill", NONE), (1, "twice", FORKED), (2, "kill", NONE)])
LEFT = told("map", THREADS, [(4, "twice", FORKED), (1, "same", NONE)], [], in_order=False)
STAYED = told("steps", FORKED, [], [(1, "elsewhere", THREADS)], [], persistent=True)
SERVED_ONES = told("bulk", SERVED, [(2, "kill", NONE), (1, "elsewhere", THREADS)], in_order=False)
WENT_ON = told("endless", THREADS, [(3, "same", NONE)], [(1, "twice", FORKED)], persistent=True)


def test_histories_lose_and_change_nothing(caplog):
    """No sample is lost, comes twice or has other random bits, in any seat."""
    done: Counter[str] = Counter()
    caplog.set_level(logging.ERROR, "spdl_torch.data")

    @settings(QUICK, max_examples=12)
    @given(histories())
    @example(KILLED)
    @example(LEFT)
    @example(STAYED)
    @example(WENT_ON)
    @example(SERVED_ONES)
    def run(history):
        check(history, done)

    gc.collect()
    run()
    assert done["kill"] >= 3
    assert done["twice"] >= 3


@pytest.mark.long
def test_histories_lose_and_change_nothing_for_long(long_seconds, caplog):
    """The same for other histories in every run, until the time is over."""
    done: Counter[str] = Counter()
    caplog.set_level(logging.ERROR, "spdl_torch.data")

    @settings(QUICK, derandomize=False, database=None, max_examples=25)
    @given(histories(ALL_SEATS))
    def run(history):
        check(history, done)

    gc.collect()
    end = monotonic() + long_seconds
    while monotonic() < end:
        run()
    print(dict(sorted(done.items())))
