"""States of loaders with one field changed: each is loaded, or refused by the name of its field."""

import copy
import json
import random
import re
from collections import Counter
from itertools import islice

import pytest
import torch
from _datasets import Deck, Endless, Indices, Live, LiveIterators
from _loader_helpers import DataLoader, no_thread_left
from torch.utils.data import BatchSampler, DistributedSampler

from spdl_torch import DistributedSampler as OurDistributedSampler, PipelineDataset
from spdl_torch.pipeline import PipelineBuilder

__all__ = ["no_thread_left"]


NUM_SAMPLES = 24
STATES_PER_SECOND = 30
"""In the long form; most of them take a fiftieth of a second."""


class Order(Deck):
    """A sampler that keeps a state, and looks at one that it gets."""

    def load_state_dict(self, state):
        if not set(state["left"]) <= set(range(NUM_SAMPLES)):
            raise ValueError("no such samples")
        super().load_state_dict({**state, "left": list(state["left"])})


class Counting(Indices):
    """A map-style dataset that keeps a state."""

    count = 0

    def __getitem__(self, index):
        self.count += 1
        return index

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"] + 0


def plain(num_workers, **options):
    options = {"batch_size": 4, **options} if "batch_sampler" not in options else options
    return DataLoader(range(NUM_SAMPLES), num_workers=num_workers, **options)


MAKERS = {
    "shuffled": lambda n: plain(n, shuffle=True),
    "generator": lambda n: plain(n, shuffle=True, generator=torch.Generator().manual_seed(3)),
    "out of order": lambda n: plain(n, in_order=False, seed=3),
    "torch's ranks": lambda n: plain(n, sampler=DistributedSampler(range(NUM_SAMPLES), 2, 0)),
    "our ranks": lambda n: plain(n, sampler=OurDistributedSampler(NUM_SAMPLES, 2, 1)),
    "a sampler's state": lambda n: plain(
        n, batch_sampler=BatchSampler(Order(NUM_SAMPLES), 4, False)
    ),
    "a dataset's state": lambda n: DataLoader(Counting(NUM_SAMPLES), 4, num_workers=n),
    "iterable": lambda n: DataLoader(Live(NUM_SAMPLES), 4, num_workers=n),
    "iterators": lambda n: DataLoader(LiveIterators(NUM_SAMPLES), 4, num_workers=n),
    "persistent": lambda n: DataLoader(Endless(), 2, num_workers=n or 2, persistent_workers=True),
    "pipeline": lambda n: PipelineDataset(
        PipelineBuilder().add_source(Order(NUM_SAMPLES)).pipe(str).aggregate(4).add_sink()
    ),
}

VALUES = (
    *(None, True, False, -1, 0, 1, 2, 3, 7, 10**6, 2**63 - 1, 2**63, 10**30, 1.5, float("nan")),
    *("", "x", "a" * 5056, b"x", [], [0], [1, 2], ["x"], [None], [[1], [2]], {}, {"tuple": [1]}),
    *({"left": [1]}, {"left": [99]}, {"count": "x"}, {"given": [3]}, (), object),
)


def places_in(state, path=()):
    """Every field of a state, those of its workers and of its origin too."""
    for name, value in state.items():
        yield (*path, name)
        if name == "made_by":
            yield from places_in(value, (*path, name))
        if name == "workers":
            for number, worker in enumerate(value):
                yield from places_in(worker, (*path, name, number))


def inside(state, path):
    """A copy of a state, and what holds that field in it."""
    state = holder = copy.deepcopy(state)
    for step in path[:-1]:
        holder = holder[step]
    return state, holder


def mutated(state, chance):
    """A copy with one field changed or added, and the field's name."""
    path = chance.choice(list(places_in(state)))
    state, holder = inside(state, path)
    if chance.random() < 0.1:
        path = (*path[:-1], "another")
    holder[path[-1]] = chance.choice(VALUES)
    return state, next(step for step in reversed(path) if isinstance(step, str)), path


def saved_states():
    """Of every kind: before, in the middle of and after an epoch."""
    for kind, make in MAKERS.items():
        for num_workers in (0, 2):
            if kind in ("pipeline", "persistent") and num_workers == 0:
                continue
            torch.manual_seed(5)
            loader = make(num_workers)
            yield kind, num_workers, loader.state_dict()
            batches = iter(loader)
            assert len(list(islice(batches, 3))) == 3
            yield kind, num_workers, loader.state_dict()
            list(batches)
            yield kind, num_workers, loader.state_dict()
            del batches


def rest_of(kind, num_workers, state):
    """What a loader gives from a state, or the error by which it is refused: a ValueError of the
    loader's, what it warns of, or whatever the user's own ``load_state_dict`` raises, with a
    note."""
    torch.manual_seed(5)
    loader = MAKERS[kind](num_workers)
    try:
        loader.load_state_dict(state)
        loaded = loader.state_dict()
        batches = []
        for batch in loader:
            batches.append(batch.tolist() if isinstance(batch, torch.Tensor) else batch)
            assert len(batches) < 100, "it does not end"
    except (ValueError, UserWarning) as error:
        return error
    except Exception as error:
        if not any("load_state_dict" in note for note in getattr(error, "__notes__", ())):
            raise
        return error
    assert as_text(loaded, state) == as_text(state, state), "until iter() it is what was loaded"
    return batches


def as_text(state, given):
    """What the given state has of another, as JSON."""
    return json.dumps(part_of(state, given), sort_keys=True, default=repr)


def part_of(value, given):
    """The fields that the given value has, too: a missing one is loaded as its default."""
    if isinstance(value, dict) and isinstance(given, dict):
        return {name: part_of(value[name], given[name]) for name in given}
    if isinstance(value, list | tuple) and isinstance(given, list | tuple):
        return [part_of(*both) for both in zip(value, given, strict=True)]
    return value


def check(count, seed):
    """The outcomes."""
    chance, states, outcomes = random.Random(seed), list(saved_states()), Counter()
    for _ in range(count):
        kind, num_workers, state = chance.choice(states)
        changed, name, path = mutated(state, chance)
        before = repr(changed)
        outcome = rest_of(kind, num_workers, changed)
        assert repr(changed) == before, "loading changes nothing of the state"
        if isinstance(outcome, Exception):
            texts = [str(outcome), *getattr(outcome, "__notes__", ())]
            assert any(name in text for text in texts), (kind, path, changed, outcome)
            outcomes["refused"] += 1
            continue
        outcomes["loaded"] += 1
        again = rest_of(kind, num_workers, changed)
        if "order" not in kind:
            assert again == outcome, (kind, path, changed)
        samples = [sample for batch in outcome for sample in batch]
        assert len(samples) <= 4 * NUM_SAMPLES
    return outcomes


def test_a_field_that_every_state_has_is_not_left_out():
    """A default in its place could begin the epoch again in silence."""
    for kind, num_workers, state in saved_states():
        for path in places_in(state):
            *where, name = path
            if "made_by" in where or path == ("version",):
                continue
            damaged, holder = inside(state, path)
            del holder[name]
            name = f"workers[{where[1]}].{name}" if where else name
            with pytest.raises(ValueError, match=rf"{re.escape(name)} is missing"):
                MAKERS[kind](num_workers).load_state_dict(damaged)


def test_mutated_state_is_loaded_or_refused_by_name():
    """The short form."""
    outcomes = check(200, 1)
    assert outcomes["refused"] > 50
    assert outcomes["loaded"] > 10


@pytest.mark.long
def test_many_mutated_states_are_loaded_or_refused_by_name(long_seconds):
    """Others in every run."""
    print(check(round(STATES_PER_SECOND * long_seconds), random.SystemRandom().random()))
