"""Ctrl-C at random moments of loading: nothing is left, nothing hangs, no sample comes twice."""

import itertools
import json
import random
import re
import signal
import threading
from contextlib import suppress

import _warm
import _ways_of_draws
import numpy as np
import pytest
import torch
from _at_call import AtCall
from _datasets import IndexStream, Indices
from _folders import HELPERS
from _gates import quiet_log
from _loader_helpers import PATIENCE_SECONDS, assert_threads_end

from spdl_torch import DataLoader
from spdl_torch.loader.rng.dispatch import is_led
from spdl_torch.loader.rng.patches import of_thread
from spdl_torch.machine.starting import start
from spdl_torch.pipeline import PipelineStopped

HANG_SECONDS = 150
"""More than the program gives one round, after which it says where it hangs."""


def test_thread_that_was_started_runs_whatever_happens_to_the_wait():
    """As Python's own: it can be waited for, asked, started once and joined."""
    gate, entered = threading.Event(), threading.Event()

    def run():
        entered.set()
        assert gate.wait(PATIENCE_SECONDS)

    thread = threading.Thread(target=run)
    with pytest.raises(RuntimeError, match="cannot join thread before it is started"):
        thread.join()
    start(thread)
    assert thread.is_alive()
    assert thread.ident is not None
    assert entered.wait(PATIENCE_SECONDS)
    assert thread in threading.enumerate()
    with pytest.raises(RuntimeError, match="threads can only be started once"):
        thread.start()
    gate.set()
    thread.join()
    assert not thread.is_alive()


def test_ctrl_c_while_the_first_loader_begins_costs_nothing_later():
    """Wherever it comes among the patches of random functions: the next loader makes the rest."""
    done = _warm.run(["-W", "ignore", HELPERS / "_interrupted_install.py"], timeout=HANG_SECONDS)
    assert done.returncode == 0, done.stderr[-5000:]
    report = json.loads(done.stdout)
    assert report["tried"] >= 10
    assert report["bad"] == []


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(
    "options", [{}, {"num_workers": 1, "isolation": "thread", "prefetch_factor": 1}]
)
def test_ctrl_c_in_the_sampler_is_no_end(options):
    """A generator that it ends gives no more indices: the loop is told, and the state stays in the
    middle of the epoch."""

    def indices():
        yield from ([0], [1], [2])
        raise KeyboardInterrupt("in the sampler")

    class Order:
        def __iter__(self):
            return indices()

    loader = DataLoader(range(9), batch_sampler=Order(), **options)
    iterator, batches = iter(loader), []
    with pytest.raises(KeyboardInterrupt, match="in the sampler"):
        batches.extend(batch.tolist() for batch in iterator)
    assert batches == [[0], [1], [2]][: len(batches)]
    for _ in range(2):
        with pytest.raises(PipelineStopped, match="while a batch was asked for"):
            next(iterator)
    state = loader.state_dict()
    assert (state["finished"], state["num_samples"]) == (False, len(batches))


class Draws(Indices):
    """Samples of numbers that are drawn from the three global generators."""

    def __getitem__(self, index):
        return index, torch.rand(()), random.random(), np.random.rand()


class DrawsByItself(Draws):
    """From a generator of its own, too."""

    def __init__(self, length):
        super().__init__(length)
        self.generator = torch.Generator()

    def __getitem__(self, index):
        return *super().__getitem__(index), torch.rand((), generator=self.generator)


@pytest.mark.parametrize("way", ["key", "unseen, then key"])
def test_ctrl_c_without_workers_leaves_the_trainer_its_generators(way, monkeypatch):
    """Wherever it comes while a batch is made: afterwards nothing draws from a sample's stream."""
    _ways_of_draws.take(way, monkeypatch)
    for kind in (Draws, DrawsByItself):
        for place in itertools.count(1):
            dataset = kind(NUM_SAMPLES)
            iterator = iter(DataLoader(dataset, 4))
            next(iterator)
            before = torch.default_generator.get_state()
            with suppress(KeyboardInterrupt), AtCall(place) as ctrl_c:
                next(iterator)
            assert of_thread.streams is None, ctrl_c.where
            assert not is_led(), ctrl_c.where
            assert torch.equal(torch.default_generator.get_state(), before), ctrl_c.where
            own = getattr(dataset, "generator", None)
            assert own is None or torch.equal(own.get_state(), torch.Generator().get_state())
            if ctrl_c.where is None:
                break
        assert place > 20


NUM_SAMPLES = 40


def samples_after_ctrl_c(kind, options, place):
    """All samples of an epoch whose loop goes on after Ctrl-C at that place of a batch's way to it,
    whether Ctrl-C came, and whether it had ended the iterator."""
    loader = DataLoader(kind(NUM_SAMPLES), 4, **options)
    iterator = iter(loader)
    seen, is_over = next(iterator).tolist(), False
    try:
        with AtCall(place) as ctrl_c:
            # A statement, and no call of next(): no place lies between its end and the loop.
            for batch in iterator:
                received = batch
                break
        seen += received.tolist()
    except KeyboardInterrupt:
        pass  # in a finalizer it is swallowed
    try:
        for batch in iterator:
            seen += batch.tolist()
    except PipelineStopped:
        is_over = True
        loader.load_state_dict(loader.state_dict())
        for batch in loader:
            seen += batch.tolist()
    return sorted(seen), ctrl_c.where, is_over


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("kind", [Indices, IndexStream])
@pytest.mark.parametrize(
    ("options", "step"),
    [
        ({}, 1),
        ({"num_workers": 2, "isolation": "thread"}, 3),
        ({"num_workers": 1, "prefetch_factor": 1, "isolation": "thread"}, 1),
        ({"num_workers": 2, "isolation": "process"}, 17),
        pytest.param({"num_workers": 2, "isolation": "process"}, 2, marks=pytest.mark.long),
    ],
    ids=["none", "threads", "one job", "processes", "processes, longer"],
)
def test_iterator_that_ctrl_c_meets_is_over_or_untouched(kind, options, step):
    """Wherever it comes while a batch is awaited: the loop goes on with the iterator, or is told
    and goes on with the state. Each sample comes once. With processes, which take long, the short
    form looks at every 17th place."""
    ways = set()
    for place in itertools.count(1, step):
        seen, where, is_over = samples_after_ctrl_c(kind, options, place)
        assert seen == list(range(NUM_SAMPLES)), f"at place {place}: {where}"
        ways.add(is_over)
        # A batch that is there already has a shorter way, which may end before this place.
        if where is None and (is_over or place > 1_000 or True in ways):
            break
    assert True in ways
    assert_threads_end()


def samples_resumed_after_ctrl_c(dataset, options, place):
    """All samples of an epoch that is resumed by another loader after Ctrl-C at that place of the
    second batch's way to the loop, and whether Ctrl-C came."""
    loader = DataLoader(dataset, 4, **options)
    iterator, seen = iter(loader), []
    for batch in iterator:
        seen += batch.tolist()
        break
    try:
        with AtCall(place) as ctrl_c:
            # A statement, and no call of next(): no place lies between its end and the loop.
            for batch in iterator:
                received = batch
                break
        seen += received.tolist()
    except KeyboardInterrupt:
        pass
    again = DataLoader(dataset, 4, **options)
    again.load_state_dict(loader.state_dict())
    for batch in again:
        seen += batch.tolist()
    return sorted(seen), ctrl_c.where


class Flawed(Indices):
    """Every eighth sample fails."""

    def __getitem__(self, index):
        if index % 8 == 3:
            raise ValueError(index)
        return super().__getitem__(index)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("kind", [Indices, IndexStream, Flawed])
@pytest.mark.parametrize(
    ("options", "step"),
    [
        ({}, 1),
        ({"num_workers": 1, "prefetch_factor": 1, "isolation": "thread"}, 3),
        ({"num_workers": 2, "in_order": False, "isolation": "thread"}, 3),
        ({"num_workers": 2, "isolation": "process"}, 17),
    ],
    ids=["none", "thread", "threads, as they come", "processes"],
)
def test_state_after_ctrl_c_has_what_the_loop_has_not_had(kind, options, step):
    """Wherever it comes while a batch is awaited, or counted: resuming gives the rest, each sample
    once."""
    expected = list(range(NUM_SAMPLES))
    if kind is Flawed:
        expected = [n for n in expected if n % 8 != 3]
        options = {**options, "on_error": "skip"}
    with quiet_log():
        for place in itertools.count(1, step):
            seen, where = samples_resumed_after_ctrl_c(kind(NUM_SAMPLES), options, place)
            assert seen == expected, f"at place {place}: {where}"
            if where is None:
                break
    assert place > 10
    assert_threads_end()


class KnowsPosition:
    """Indices in order. It knows where it stands, from one iterator to the next."""

    position = 0

    def __iter__(self):
        while self.position < NUM_SAMPLES:
            self.position += 1
            yield self.position - 1
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


class Upward(KnowsPosition, torch.utils.data.Sampler):
    """A sampler that knows where it stands."""

    def __len__(self):
        return NUM_SAMPLES


def samples_resumed_of_sampler(options, place):
    """All samples of an epoch that another loader resumes after Ctrl-C at that place of the second
    batch's way to the loop, and where it came."""
    loader = DataLoader(Indices(NUM_SAMPLES), 4, sampler=Upward(), **options)
    iterator = iter(loader)
    seen = next(iterator).tolist()
    try:
        with AtCall(place) as ctrl_c:
            # As above: no place lies between the end of this statement and the loop.
            for batch in iterator:
                received = batch
                break
        seen += received.tolist()
    except KeyboardInterrupt:
        pass
    again = DataLoader(Indices(NUM_SAMPLES), 4, sampler=Upward(), **options)
    again.load_state_dict(loader.state_dict())
    for batch in again:
        seen += batch.tolist()
    return seen, ctrl_c.where


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(
    ("options", "step"),
    [
        ({}, 1),
        ({"num_workers": 1, "isolation": "thread"}, 1),
        ({"num_workers": 1, "isolation": "process"}, 17),
    ],
    ids=["none", "thread", "process"],
)
def test_state_after_ctrl_c_with_a_sampler_of_its_own_state(caplog, options, step):
    """Each sample comes once, wherever it came; but those that the sampler had passed as Ctrl-C
    came within it, which is said."""
    numbers_missing = set()
    for place in itertools.count(1, step):
        caplog.clear()
        seen, where = samples_resumed_of_sampler(options, place)
        assert len(set(seen)) == len(seen), f"twice, at place {place}: {where}"
        said = "Ctrl-C came while Upward was asked for an index" in caplog.text
        num_missing = NUM_SAMPLES - len(seen)
        assert not num_missing or (said and num_missing <= 4), f"at {place}: {where}"
        numbers_missing.add(num_missing)
        if where is None:
            break
    assert not said
    assert 0 in numbers_missing
    assert_threads_end()


class Resumable(KnowsPosition, IndexStream):
    """An iterable dataset that knows where it stands."""


def test_items_that_an_iterable_s_own_state_has_passed_are_reported(caplog):
    """Without workers it is asked where it stands, and may be past a batch that Ctrl-C cut off."""
    numbers_lost = set()
    for place in itertools.count(1):
        dataset = Resumable(NUM_SAMPLES)
        caplog.clear()
        seen, where = samples_resumed_after_ctrl_c(dataset, {}, place)
        assert len(set(seen)) == len(seen), where
        lost = NUM_SAMPLES - len(seen)
        said = re.findall(r"Resumable, which .* past its items, (\d+) at most", caplog.text)
        assert lost <= sum(map(int, said)) <= lost + 1, where
        numbers_lost.add(lost)
        if where is None:
            break
    assert {0, 1, 4} <= numbers_lost


def came_at_the_end(kind, place, **options):
    """Whether Ctrl-C came at that place of the end's way to the loop, which sees the end then, as
    does a loop that resumes; or which gets a whole epoch next."""
    loader = DataLoader(kind(8), 4, **options)
    iterator = iter(loader)
    for _ in range(2):
        next(iterator)
    try:
        with AtCall(place):
            for batch in iterator:
                raise AssertionError(batch)
    except KeyboardInterrupt:
        pass
    else:
        assert loader.state_dict()["finished"]
        return False
    state = loader.state_dict()
    try:
        assert list(iterator) == []
    except PipelineStopped:
        pass
    loader.load_state_dict(state)
    assert list(loader) == [], f"the end is lost, at place {place}"
    assert len(list(loader)) == 2
    return True


# A file of /proc that Ctrl-C leaves open is closed with its object, and said to be.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("kind", [Indices, IndexStream])
@pytest.mark.parametrize(
    ("options", "step"),
    [
        ({}, 2),
        ({"num_workers": 1, "isolation": "thread"}, 101),
        ({"num_workers": 1, "isolation": "thread", "persistent_workers": True}, 101),
        ({"num_workers": 1, "isolation": "process"}, 401),
    ],
    ids=["none", "thread", "persistent", "process"],
)
def test_end_that_ctrl_c_cuts_off_comes_again(kind, options, step):
    """Wherever it comes before the loop has seen the end: with workers, at some of the places."""
    count = itertools.takewhile(
        lambda place: came_at_the_end(kind, place, **options), itertools.count(1, step)
    )
    assert len(list(count)) >= 3
    assert_threads_end()


def test_timeout_that_a_handler_raises_ends_the_iterator():
    """It is not taken for the end of a wait, after which the loop would wait on."""
    asked = threading.Event()

    class Alarmed(Indices):
        def __getitem__(self, index):
            assert asked.wait(PATIENCE_SECONDS)
            signal.raise_signal(signal.SIGALRM)
            return super().__getitem__(index)

    def alarm(*_):
        raise TimeoutError("the program's own")

    before = signal.signal(signal.SIGALRM, alarm)
    try:
        batches = iter(DataLoader(Alarmed(1), num_workers=1, isolation="thread"))
        with pytest.raises(TimeoutError, match="the program's own"):
            next(batches, asked.set())
        with pytest.raises(PipelineStopped, match="has ended this iterator"):
            next(batches)
    finally:
        signal.signal(signal.SIGALRM, before)
