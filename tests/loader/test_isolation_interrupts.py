"""Ctrl-C at any moment of a loader's life: no process, thread, descriptor or memory is left."""

import gc
import itertools
import multiprocessing
import os
import random
import signal
import sys
import threading
import warnings
from contextlib import contextmanager, suppress
from time import monotonic

import psutil
import pytest
import torch
from support.at_call import AtCall
from support.datasets import Images
from support.gates import in_thread, result_of, shared_memory_of, until
from support.isolated import num_mapped_slabs, release_what_has_ended
from support.loaders import PATIENCE_SECONDS, assert_threads_end

from spdl_torch import DataLoader
from spdl_torch.pipeline import PipelineStopped

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="sends signals")


@contextmanager
def at_time(seconds):
    """Interrupt the main thread so many seconds later, wherever it is: in a wait, too."""
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def belongings():
    """What a loader might leave."""
    gc.collect()
    return {
        "threads": [t.name for t in threading.enumerate() if t.ident and "spdl" in t.name],
        "children": sorted(p.pid for p in psutil.Process().children(recursive=True)),
        "processes": [p.name for p in multiprocessing.active_children()],
        "descriptors": sorted(os.listdir("/proc/self/fd")),
        "slabs": num_mapped_slabs(),
        "names": shared_memory_of(os.getpid()),
        **settings(),
    }


def settings():
    """What is the trainer's own."""
    return {
        "signals": signal.pthread_sigmask(signal.SIG_BLOCK, []),
        "handlers": [signal.getsignal(number) for number in signal.valid_signals()],
        "warnings": list(warnings.filters),
        "intra-op threads": result_of(in_thread(torch.get_num_threads)),
    }


def assert_nothing_is_left(before, where):
    """When the next loader has begun, as soon as the child has ended."""
    release_what_has_ended()
    end = monotonic() + PATIENCE_SECONDS
    while (left := belongings()) != before:
        assert monotonic() < end, f"{where}: {left} instead of {before}"
        threading.Event().wait(0.005)


def whole_life(rng, isolation):
    """Of a loader: two epochs, of which one may be left early."""
    options = {"num_workers": rng.choice([1, 2]), "persistent_workers": rng.random() < 0.5}
    loader = DataLoader(Images(12), 4, isolation=isolation, **options)
    for _ in range(2):
        for _ in itertools.islice(loader, rng.choice([1, 2, 3, 9])):
            pass


def interrupted_life(rng, isolation, interrupt):
    try:
        with interrupt:
            whole_life(rng, isolation)
    except KeyboardInterrupt:
        pass
    except RuntimeError as error:  # Python's own again: its Condition, interrupted while it waits
        if not isinstance(error.__context__, KeyboardInterrupt):
            raise


@pytest.fixture
def before(monkeypatch):
    """Belongings, with what a first loader opens for good."""
    # Ctrl-C in a finalizer is printed and dropped; pytest would keep it, and all it refers to.
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)
    own = settings()
    whole_life(random.Random(0), "process")
    assert_threads_end()
    release_what_has_ended()
    return {**belongings(), **own}


@pytest.mark.parametrize(("isolation", "num_places"), [("thread", 16), ("process", 12)])
def test_nothing_is_left_when_ctrl_c_comes(before, isolation, num_places):
    """At some places of a life, the same in every run."""
    counter = AtCall(0)
    interrupted_life(random.Random(1), isolation, counter)
    rng = random.Random(2)
    for _ in range(num_places):
        interrupt = AtCall(rng.randrange(-counter.number))
        interrupted_life(random.Random(1), isolation, interrupt)
        assert_nothing_is_left(before, interrupt.where)


@pytest.mark.parametrize(("isolation", "step"), [("thread", 17), ("process", 31)])
def test_close_that_ctrl_c_cuts_off_is_finished_by_the_next_one(before, isolation, step):
    """Wherever it comes in the first one, though somebody keeps the iterator."""
    for place in itertools.count(1, step):
        loader = DataLoader(list(range(12)), 4, num_workers=2, isolation=isolation)
        next(batches := iter(loader))
        with suppress(KeyboardInterrupt), AtCall(place) as interrupt:
            loader.close()
        loader.close()
        assert_threads_end()
        until(lambda: not multiprocessing.active_children())
        with pytest.raises(PipelineStopped, match="the loader of this iterator was closed"):
            next(batches)
        del batches, loader
        assert_nothing_is_left(before, interrupt.where)
        if interrupt.where is None:
            break
    assert place > 1, "there are places where it can come"


@pytest.mark.long
@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_nothing_is_left_when_ctrl_c_comes_for_long(before, isolation, long_seconds):
    """At other places in every run, and at any moment, waits included."""
    rng, end, own = random.Random(), monotonic() + long_seconds, signal.getsignal(signal.SIGALRM)
    while monotonic() < end:
        place, seconds = rng.randrange(5_000), rng.random() / 8
        interrupt = rng.choice([AtCall(place), at_time(seconds)])
        interrupted_life(rng, isolation, interrupt)
        signal.signal(signal.SIGALRM, own)  # it may have cut off at_time() itself
        assert_nothing_is_left(before, getattr(interrupt, "where", f"after {seconds} s"))
