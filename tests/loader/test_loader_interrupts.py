"""Ctrl-C, or an error of a signal's handler, at any moment of loading: nothing hangs, no sample is
lost or comes twice."""

import itertools
import random
import re
import signal
from contextlib import suppress
from functools import partial

import numpy as np
import pytest
import torch
from support import ways_of_draws
from support.at_call import AtCall, TooLate, handled
from support.covering import by_pairs
from support.datasets import Drawing, IndexStream, Indices, Positioned
from support.forks import found_in_fork, found_in_new
from support.gates import quiet_log
from support.loaders import assert_threads_end

from spdl_torch import DataLoader
from spdl_torch.loader.rng.dispatch import is_led
from spdl_torch.loader.rng.patches import of_thread
from spdl_torch.pipeline import PipelineStopped

STEP = 499
"""Between two places that are tried: a prime, so that loops are not met at one place alone."""


class Late(Exception):
    """No OSError: Python's imports take any of those for a file that is not there."""


def at_deadline(*_):
    """A handler of the program."""
    raise Late


def drawn_globally():
    """Numbers from the three global generators."""
    numbers = torch.rand(()).item(), random.random(), np.random.rand(), np.random.ranf()
    return torch.tensor(numbers, dtype=torch.float64)


def drawing(**options):
    return DataLoader(Drawing(drawn_globally, 8), 4, isolation="thread", **options)


def seen_after(place, signal_number, error):
    """The place of the signal, or None if the first loader had begun before, and what loaders and
    the program draw then."""
    with AtCall(place, signal_number) as at_call:
        try:
            # Held: what a handler raises in a finalizer is only printed.
            iterator = iter(drawing(num_workers=1))
            next(iterator)
        except error:
            pass
    batches = [batch for number in (0, 2) for batch in drawing(num_workers=number, seed=3)]
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(1)
    return at_call.where, torch.cat([*batches, drawn_globally()[None]]).tolist()


def tried_in_first_loaders():
    """How many places of each signal were tried, and those at which something else came than what
    its handler raises, or later draws were not as without it. Each is tried in a fork."""
    signal.signal(signal.SIGALRM, at_deadline)
    numbers, bad = [], []
    for raised in ((signal.SIGINT, KeyboardInterrupt), (signal.SIGALRM, Late)):
        _, expected = found_in_fork(lambda raised=raised: seen_after(10**9, *raised))
        for place in itertools.count(1, STEP):
            found = found_in_fork(lambda: seen_after(place, *raised))  # noqa: B023
            where, seen = (found, None) if isinstance(found, str) else found  # an error's text
            if where is None:
                break
            if seen != expected:
                bad.append((place, where))
        numbers.append(place // STEP)
    return numbers, bad


def test_signal_while_the_first_loader_begins_costs_nothing_later():
    """Wherever it comes, among the patches of random functions, too: what its handler raises, an
    Exception as well as Ctrl-C, reaches the loop, and the next loader makes the rest."""
    numbers, bad = found_in_new(tried_in_first_loaders)
    assert min(numbers) >= 8
    assert bad == []


class Draws(Indices):
    """Samples of numbers that are drawn from the three global generators, and from its own."""

    def __init__(self, generator):
        super().__init__(8)
        self.generator = generator

    def __getitem__(self, index):
        own = None if self.generator is None else torch.rand((), generator=self.generator)
        return index, torch.rand(()), random.random(), np.random.rand(), own or 0


# Where Python itself drops what is raised: torch 2.9 looks at the stack when it registers a kernel.
@pytest.mark.filterwarnings("ignore:Exception ignored in.*(StackSummary|WeakSet)")
@pytest.mark.parametrize("has_own", [False, True])
@pytest.mark.parametrize("way", ["key", "unseen, then key"])
def test_ctrl_c_without_workers_leaves_the_trainer_its_generators(way, has_own, monkeypatch):
    """Wherever it comes while a batch is made: afterwards nothing draws from a sample's stream."""
    ways_of_draws.take(way, monkeypatch)
    for place in itertools.count(1, 3):
        own = torch.Generator() if has_own else None
        iterator = iter(DataLoader(Draws(own), 4))
        next(iterator)
        before = torch.default_generator.get_state()
        with suppress(KeyboardInterrupt), AtCall(place) as ctrl_c:
            next(iterator)
        assert of_thread.streams is None, ctrl_c.where
        assert not is_led(), ctrl_c.where
        assert torch.equal(torch.default_generator.get_state(), before), ctrl_c.where
        assert own is None or torch.equal(own.get_state(), torch.Generator().get_state())
        if ctrl_c.where is None:
            break
    assert place > 20


NUM_SAMPLES, BAD = 24, (3, 11, 19)


class Resumable(Positioned, IndexStream):
    """Indices in order, as a dataset or as a sampler."""


SIGNALS = {"Ctrl-C": signal.SIGINT, "an error": signal.SIGUSR1}
"""By what comes of them."""


def interrupted(make, place, more=(), number=signal.SIGINT):
    """What the loop got until a signal came at that place of the second batch's way to it, what
    another loader gives with the state from then, what the iterator itself still gives (None: it is
    over, and says so), and where the signal came. ``more``: options of the other loader."""
    loader = make()
    iterator = iter(loader)
    seen = next(iterator).tolist()
    try:
        with AtCall(place, number) as at_call:
            # A statement, and no call of next(): no place lies between its end and the loop.
            for batch in iterator:
                received = batch
                break
        seen += received.tolist()
    except (KeyboardInterrupt, TooLate):
        pass  # in a finalizer it is swallowed
    again = make(**dict(more))
    again.load_state_dict(loader.state_dict())
    resumed = [sample for batch in again for sample in batch.tolist()]
    try:
        rest = [sample for batch in iterator for sample in batch.tolist()]
    except PipelineStopped:
        rest = None
    return seen, resumed, rest, at_call.where


DATA = {
    "samples": lambda **options: DataLoader(Indices(NUM_SAMPLES), 4, **options),
    "stream": lambda **options: DataLoader(IndexStream(NUM_SAMPLES), 4, **options),
    "flawed": lambda **options: DataLoader(
        Indices(NUM_SAMPLES, BAD), 4, on_error="skip", **options
    ),
    "sampler": lambda **options: DataLoader(
        Indices(NUM_SAMPLES), 4, sampler=Resumable(NUM_SAMPLES), **options
    ),
}
# With the step from one place to the next: all take long, and those of processes longest.
WORKERS = {
    "none": ({}, 2),
    "thread": ({"num_workers": 1, "prefetch_factor": 1, "isolation": "thread"}, 2),
    "threads, as they come": ({"num_workers": 2, "in_order": False, "isolation": "thread"}, 5),
    "processes": ({"num_workers": 2, "isolation": "process"}, 61),
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
@pytest.mark.usefixtures("_too_late")
@by_pairs(workers=WORKERS, data=DATA, raised=SIGNALS)
def test_no_sample_is_lost_or_comes_twice_after_a_signal(workers, data, raised, caplog):
    """Wherever it comes while a batch is awaited, as Ctrl-C or as a handler's error, which is not
    taken for the dataset's: the iterator goes on as if it had not, or says that it is over; a state
    gives what the loop has not had. Of a sampler with a state of its own, what it had passed as
    Ctrl-C came within it is missing, which the log says."""
    options, step = WORKERS[workers]
    expected = [n for n in range(NUM_SAMPLES) if data != "flawed" or n not in BAD]
    were_over, numbers_missing = set(), set()
    with quiet_log():
        for place in itertools.count(1, step):
            caplog.clear()
            # Threads go on where processes were, which takes less time.
            more = {"isolation": "thread"} if options else {}
            seen, resumed, rest, where = interrupted(
                lambda **more: DATA[data](**{**options, **more}), place, more, SIGNALS[raised]
            )
            assert rest is None or sorted(seen + rest) == expected, f"at place {place}: {where}"
            missing = sorted({*expected} - {*seen, *resumed})
            assert sorted(seen + resumed + missing) == expected, f"twice, at {place}: {where}"
            said = "Ctrl-C came while Resumable was asked for an index" in caplog.text
            assert not missing or (said and len(missing) <= 4), f"at place {place}: {where}"
            were_over.add(rest is None)
            numbers_missing.add(len(missing))
            if where is None:
                break
    assert place > 10
    assert True in were_over
    assert 0 in numbers_missing
    assert_threads_end()


def where_it_came(kind, place, **options):
    """Where Ctrl-C came, at that place of the end's way to the loop (None: there is no such place).
    The loop sees the end then, as does a loop that resumes; or it gets a whole epoch next."""
    loader = DataLoader(kind(8), 4, **options)
    iterator = iter(loader)
    for _ in range(2):
        next(iterator)
    try:
        with AtCall(place) as at_call:
            for batch in iterator:
                raise AssertionError(batch)
    except KeyboardInterrupt:
        pass
    else:  # there was none, or it was swallowed in a finalizer
        assert loader.state_dict()["finished"]
        return at_call.where
    state = loader.state_dict()
    with suppress(PipelineStopped):
        assert list(iterator) == []
    loader.load_state_dict(state)
    assert list(loader) == [], f"the end is lost: {at_call.where}"
    assert len(list(loader)) == 2
    assert of_thread.streams is None, at_call.where
    return at_call.where


# A file of /proc that Ctrl-C leaves open is closed with its object, and said to be.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("kind", "options", "step"),
    [
        (Indices, {}, 1),
        (IndexStream, {}, 1),
        (Indices, {"num_workers": 1, "isolation": "thread"}, 101),
        (IndexStream, {"num_workers": 1, "isolation": "thread", "persistent_workers": True}, 101),
        (IndexStream, {"num_workers": 1, "isolation": "process"}, 101),
    ],
    ids=["none", "none, stream", "thread", "persistent, stream", "process, stream"],
)
def test_end_that_ctrl_c_cuts_off_comes_again(kind, options, step):
    """Wherever it comes before the loop has seen the end: with workers, at some of the places."""
    count = itertools.takewhile(
        lambda place: where_it_came(kind, place, **options), itertools.count(1, step)
    )
    assert len(list(count)) >= 3
    assert_threads_end()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
@by_pairs(workers=["none", "thread", "processes"], own=[True, False])
def test_signal_in_iter_leaves_the_epoch_as_it_would_have_come(workers, own):
    """Wherever it comes while an epoch begins, on workers that are new or persist: a state from
    then gives that epoch, in its order, and the one after it; the loader's next epoch is whole."""
    options, step = WORKERS[workers]
    options = {**options, "persistent_workers": own} if options else {}

    def make(**more):
        generator = torch.Generator() if own else None
        options_now = {**options, **(more if options else {})}
        return DataLoader(Indices(12), 4, shuffle=True, generator=generator, **options_now)

    def epochs(loader, number):
        return [[batch.tolist() for batch in loader] for _ in range(number)]

    torch.manual_seed(7)
    expected = epochs(make(), 3)
    with quiet_log():
        for place in itertools.count(1, 7 * step):
            torch.manual_seed(7)
            loader = make()
            epochs(loader, 1)
            with suppress(KeyboardInterrupt), AtCall(place) as at_call:
                iter(loader)
            # Threads go on where processes were, which takes less time.
            again = make(isolation="thread")
            again.load_state_dict(loader.state_dict())
            assert epochs(again, 2) == expected[1:], at_call.where
            whole = [index for batch in loader for index in batch.tolist()]
            assert sorted(whole) == list(range(12)), at_call.where
            if at_call.where is None:
                break
    assert place > 10
    del loader, again
    assert_threads_end()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_error_of_a_handler_comes_out_of_iter():
    """Of a resumed loader, too, which takes errors of many kinds for a state that does not fit."""

    class LateValue(ValueError):
        pass

    def handler(*_):
        raise LateValue

    def make():
        return DataLoader(Indices(12), 4, shuffle=True, generator=torch.Generator())

    loader = make()
    next(iter(loader))
    state, raised = loader.state_dict(), 0
    with handled(handler):
        for place in itertools.count(1, 37):
            resumed = make()
            resumed.load_state_dict(state)
            came = None
            try:
                with AtCall(place, signal.SIGUSR1) as at_call:
                    iter(resumed)
            except Exception as error:
                came = error
            assert type(came) in (LateValue, type(None)), f"{came!r} at {at_call.where}"
            raised += came is not None
            if at_call.where is None:
                break
    assert raised > 6


def test_items_that_an_iterable_s_own_state_has_passed_are_reported(caplog):
    """Without workers it is asked where it stands, and may be past a batch that Ctrl-C cut off."""
    numbers_lost = set()
    for place in itertools.count(1, 2):
        dataset = Resumable(NUM_SAMPLES)
        caplog.clear()
        seen, resumed, _, where = interrupted(partial(DataLoader, dataset, 4), place)
        seen += resumed
        assert len(set(seen)) == len(seen), where
        lost = NUM_SAMPLES - len(seen)
        said = re.findall(r"Resumable, which .* past its items, (\d+) at most", caplog.text)
        assert lost <= sum(map(int, said)) <= lost + 1, where
        numbers_lost.add(lost)
        if where is None:
            break
    assert {0, 4} < numbers_lost  # and some in the middle of a batch
