"""What holds of a loader's iterator at any time, in every seat that has it: what a signal's handler
may do, what comes after a timeout and after a close."""

import itertools
import multiprocessing
import os
import signal
import threading
from contextlib import suppress

import pytest
from support.at_call import AtCall, handled
from support.covering import by_pairs
from support.datasets import IndexStream, Indices, Made, share_of_worker
from support.gates import in_thread, result_of, until
from support.inside import is_asked
from support.seats import FORKED, NONE, THREADS, in_every_seat, in_seats
from torch.utils.data import IterableDataset

from spdl_torch.pipeline import PipelineStopped

LENGTH = 40
with_workers = in_seats(THREADS, FORKED)


def step_of(seat):
    """To look at every place takes long where each look starts processes."""
    return 37 if seat.are_processes else 7 if seat.are_threads else 1


def indices_of(batches):
    """All that come."""
    return [index for batch in batches for index in batch.tolist()]


@by_pairs(seat=[NONE, THREADS, FORKED], kind=[Indices, IndexStream])
def test_state_that_a_handler_takes_has_what_the_loop_has_not_had(seat, kind):
    """At any call of a batch's way to the loop; which goes on as if nothing had been."""
    states = []
    with handled(lambda *_: states.append(loader.state_dict())):
        for place in itertools.count(1, step_of(seat)):
            loader = seat.loader(kind(LENGTH), 4)
            states.clear()
            batches = iter(loader)
            first, others = next(batches).tolist(), []
            with AtCall(place, signal.SIGUSR1) as at_call:
                # A statement, and no call of next(): no place lies between its end and the loop.
                for batch in batches:
                    received = batch
                    break
            others += received.tolist() + indices_of(batches)
            assert sorted(first + others) == list(range(LENGTH))
            if not states or at_call.where.startswith(__file__):
                break
            again = seat.loader(kind(LENGTH), 4)
            again.load_state_dict(states[0])
            assert indices_of(again) == others
    assert place > 10


def limited(index):
    """A sample that limits its time by a handler of its own; one takes too long."""

    def raise_too_late(*_):
        raise TimeoutError

    signal.signal(signal.SIGUSR1, raise_too_late)
    if index == 3:
        signal.raise_signal(signal.SIGUSR1)
    return index


def test_limit_that_a_dataset_sets_in_a_worker_process_is_the_samples():
    """It is left out like any other that fails."""
    loader = FORKED.loader(Made(limited, 8), 4, on_error="skip", error_budget=1)
    assert [batch.tolist() for batch in loader] == [[0, 1, 2], [4, 5, 6, 7]]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
@in_every_seat
def test_ctrl_c_ends_no_other_loader(seat):
    """Wherever it comes, as a loader begins or awaits a batch. Python swallows it in a finalizer,
    and closes with a warning what it cuts off inside of a function of Python's.
    """
    other = iter(seat.loader(Indices(LENGTH), 4))
    seen = next(other).tolist()
    for place in range(1, 400, 3 * step_of(seat) + 10):
        loader = seat.loader(Indices(LENGTH), 4)
        with suppress(KeyboardInterrupt), AtCall(place):
            next(iter(loader))
        del loader
    assert seen + [index for batch in other for index in batch.tolist()] == list(range(LENGTH))


class Gated(Indices):
    """Indices, one of which waits until somebody writes into its pipe."""

    thread_safe = True

    def __init__(self):
        super().__init__(8)
        self.held, self.pipe = 2, os.pipe()

    def __getitem__(self, index):
        if index == self.held:
            os.read(self.pipe[0], 1)
        return index

    def open(self):
        """Let whoever waits go on, or comes later."""
        os.write(self.pipe[1], b"12345678")


class GatedStream(Gated, IterableDataset):
    """The same of an iterable, which waits in its beginning."""

    def __iter__(self):
        self[self.held]
        return iter(share_of_worker(8))


@pytest.fixture(params=[Gated, GatedStream])
def gated(request):
    """Somebody waits: for the third sample, or for the beginning."""
    dataset = request.param()
    yield dataset
    dataset.open()
    for end in dataset.pipe:
        os.close(end)


@with_workers
def test_timeout_says_where_the_worker_is_and_the_batch_comes_after_it(seat, gated):
    """By the user's frames alone, not those of the trainer, which a forked child's stack begins
    with. That batch and those after it come once each."""
    seen, told = [], None
    batches = iter(seat.loader(gated, 1, timeout=0.2))
    while len(seen) < len(gated):
        try:
            seen += next(batches).tolist()
        except RuntimeError as error:  # also where the machine has no time for a worker
            if "os.read(" in str(error):
                told = str(error)
                gated.open()
    assert "DataLoader timed out after 0.2 seconds" in told
    is_stream = isinstance(gated, GatedStream)
    assert ("iter(GatedStream)" if is_stream else "sample index 2") in told
    frames = [line for line in told.splitlines() if line.startswith("  File")]
    assert frames
    assert all(__file__ in line for line in frames)
    assert sorted(seen) == list(range(8))


@pytest.mark.parametrize("gated", [Gated], indirect=True)
@in_seats(NONE, THREADS, FORKED)
def test_thread_that_asks_beside_another_one_gets_an_error(seat, gated):
    """And the other one its batch."""
    batches = iter(seat.loader(gated, 1))
    assert [next(batches).item() for _ in range(2)] == [0, 1]
    other = in_thread(next, batches)
    until(lambda: is_asked(batches))
    with pytest.raises(RuntimeError, match="while another one is under way"):
        next(batches)
    gated.open()
    assert result_of(other).item() == 2
    assert indices_of(batches) == [3, 4, 5, 6, 7]


@pytest.mark.parametrize("gated", [Gated], indirect=True)
@with_workers
def test_loop_that_waits_is_told_of_a_close(seat, gated):
    """By whichever thread; again and again, it is over. Nobody takes the place of a process that
    ends by it."""
    children = set(multiprocessing.active_children())
    loader = seat.loader(gated, 1)
    batches = iter(loader)
    assert [next(batches).item() for _ in range(2)] == [0, 1]

    def close():
        until(lambda: is_asked(batches))
        loader.close()

    closing = threading.Thread(target=close)
    closing.start()
    for _ in range(2):
        with pytest.raises(PipelineStopped, match="was closed"):
            next(batches)
    gated.open()
    closing.join()
    loader.close()
    until(lambda: set(multiprocessing.active_children()) <= children)
    with pytest.raises(PipelineStopped, match="was closed"):
        next(batches)
