"""Ctrl-C at any moment of a loader's life: no process, thread, descriptor or memory is left."""

from __future__ import annotations

import itertools
import os
import random
import sys
from time import monotonic

import pytest
from _at_call import AtCall
from _ctrl_c import AtTime, assert_nothing_is_left, belongings
from _isolated import release_what_has_ended
from _isolation_data import Images
from _loader_helpers import assert_threads_end

from spdl_torch import DataLoader

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="sends signals"),
]


def whole_life(rng, isolation):
    """Of a loader: two epochs, of which one may be left early."""
    options = {"num_workers": rng.choice([1, 2]), "persistent_workers": rng.random() < 0.5}
    loader = DataLoader(Images(12), 4, isolation=isolation, **options)
    for _ in range(2):
        num_batches = rng.choice([0, 1, 2, 3, 9])
        for number, _ in enumerate(loader):
            if number == num_batches:
                break


def interrupted_life(rng, isolation, interrupt):
    """Whether it was interrupted."""
    try:
        with interrupt:
            whole_life(rng, isolation)
    except KeyboardInterrupt:
        return True
    except RuntimeError as error:  # Python's own again: its Condition, interrupted while it waits
        if not isinstance(error.__context__, KeyboardInterrupt):
            raise
        return True
    return False


@pytest.fixture
def before(monkeypatch):
    """Belongings with the fork server, which stays."""
    # Ctrl-C in a finalizer is printed and dropped; pytest would keep it, and all it refers to.
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)
    whole_life(random.Random(0), "process")
    assert_threads_end()
    release_what_has_ended()
    return belongings()


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_nothing_is_left_when_ctrl_c_comes(before, isolation):
    """At 16 places of a life, the same in every run."""
    counter = AtCall(0)
    interrupted_life(random.Random(1), isolation, counter)
    num_places, rng = -counter.number, random.Random(2)
    for _ in range(16):
        interrupt = AtCall(rng.randrange(num_places))
        interrupted_life(random.Random(1), isolation, interrupt)
        assert_nothing_is_left(before, interrupt.where)


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_epoch_is_whole_after_ctrl_c_where_a_persistent_loader_began_one(before, isolation):
    """At some of the places where the workers of the first epoch are given a second one."""
    for place in itertools.count(1, 71):
        loader = DataLoader(
            list(range(12)), 4, num_workers=2, persistent_workers=True, isolation=isolation
        )
        whole = [batch.tolist() for batch in loader]
        interrupt = AtCall(place)
        try:
            with interrupt:
                iter(loader)
        except KeyboardInterrupt:
            pass
        assert [batch.tolist() for batch in loader] == whole, interrupt.where
        del loader
        assert_nothing_is_left(before, interrupt.where)
        if interrupt.where is None:
            break
    assert place > 1, "there are places where it can come"


@pytest.mark.long
@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_nothing_is_left_when_ctrl_c_comes_for_long(before, isolation, long_seconds):
    """At other places in every run, and at any moment, waits included."""
    rng, end, counts = random.Random(), monotonic() + long_seconds, [0, 0]
    while monotonic() < end:
        interrupt = rng.choice([AtCall(rng.randrange(5_000)), AtTime(rng.random() / 8)])
        counts[0] += 1
        counts[1] += interrupted_life(rng, isolation, interrupt)
        assert_nothing_is_left(before, interrupt.where)
    print(f"{counts[1]} lives were interrupted, {counts[0] - counts[1]} ended first")
