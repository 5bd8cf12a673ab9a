"""What holds of a loader's iterator at any time, in every seat that has it: where the sampler is
asked, what a signal's handler may do, what comes after a timeout and after a close."""

import itertools
import multiprocessing
import os
import signal
import threading
from contextlib import suppress

import pytest
from _at_call import AtCall
from _covering import by_pairs
from _datasets import IndexStream, Indices
from _gates import until
from _inside import is_waiting
from _seats import FORKED, NONE, THREADS, in_every_seat, in_seats
from torch.utils.data import Dataset

from spdl_torch.pipeline import PipelineStopped

LENGTH = 40
with_workers = in_seats(THREADS, FORKED)


def step_of(seat):
    """To look at every place takes long where each look starts processes."""
    return 37 if seat.are_processes else 7 if seat.are_threads else 1


@by_pairs(seat=[NONE, THREADS, FORKED], kind=[Indices, IndexStream])
def test_state_that_a_handler_takes_has_what_the_loop_has_not_had(seat, kind):
    """At any call of a batch's way to the loop; which goes on as if nothing had been."""
    before = signal.getsignal(signal.SIGUSR1)
    try:
        for place in itertools.count(1, step_of(seat)):
            loader, states = seat.loader(kind(LENGTH), 4), []
            signal.signal(signal.SIGUSR1, lambda *_: states.append(loader.state_dict()))  # noqa: B023
            batches = iter(loader)
            first, others = next(batches).tolist(), []
            with AtCall(place, signal.SIGUSR1) as at_call:
                # A statement, and no call of next(): no place lies between its end and the loop.
                for batch in batches:
                    received = batch
                    break
            others += received.tolist()
            others += [index for batch in batches for index in batch.tolist()]
            assert sorted(first + others) == list(range(LENGTH))
            if not states or at_call.where.startswith(__file__):
                break
            again = seat.loader(kind(LENGTH), 4)
            again.load_state_dict(states[0])
            assert [index for batch in again for index in batch.tolist()] == others
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert place > 10


class TooLate(TimeoutError):
    """What a handler raises that limits the time of a loop, as many are written."""


def raise_too_late(*_):
    raise TooLate


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
@by_pairs(seat=[NONE, THREADS, FORKED], kind=[Indices, IndexStream], on_error=["raise", "skip"])
def test_error_that_a_handler_raises_costs_the_loop_no_sample(seat, kind, on_error):
    """It is not the dataset's, wherever it comes: the loop gets it as itself, and the state has
    what the loop has not had."""
    before = signal.signal(signal.SIGUSR1, raise_too_late)
    try:
        for place in itertools.count(1, 3 * step_of(seat)):
            loader = seat.loader(kind(LENGTH), 4, on_error=on_error)
            batches, received = iter(loader), None
            had = next(batches).tolist()
            with suppress(TooLate), AtCall(place, signal.SIGUSR1) as at_call:
                for batch in batches:
                    received = batch
                    break
            had += [] if received is None else received.tolist()
            if at_call.where is None or at_call.where.startswith(__file__):
                break
            again = seat.loader(kind(LENGTH), 4, on_error=on_error)
            again.load_state_dict(loader.state_dict())
            had += [n for batch in again for n in batch.tolist()]
            assert sorted(had) == list(range(LENGTH))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert place > 10


class Limited(Indices):
    """Limits the time of a sample by a handler of its own; one sample takes too long."""

    def __getitem__(self, index):
        signal.signal(signal.SIGUSR1, raise_too_late)
        if index == 3:
            signal.raise_signal(signal.SIGUSR1)
        return super().__getitem__(index)


@in_seats(FORKED)
def test_limit_that_a_dataset_sets_in_a_worker_process_is_the_samples(seat):
    """It is left out like any other that fails."""
    loader = seat.loader(Limited(8), 4, on_error="skip", error_budget=1)
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


class Gated(Dataset):
    """Indices, one of which waits until somebody writes into its pipe."""

    thread_safe = True

    def __init__(self, gate, held):
        os.mkfifo(gate)
        self.gate, self.held = gate, held
        self.end = os.open(gate, os.O_RDWR)  # nobody else waits for one to open it

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == self.held:
            with open(self.gate, "rb", buffering=0) as gate:
                gate.read(1)
        return index

    def open(self):
        """Let whoever waits go on, or comes later."""
        os.write(self.end, b"12345678")


@pytest.fixture
def gated(tmp_path):
    """Its third sample waits."""
    dataset = Gated(str(tmp_path / "gate"), 2)
    yield dataset
    dataset.open()
    os.close(dataset.end)


@with_workers
def test_batch_comes_after_a_timeout(seat, gated):
    """And those after it, each once."""
    seen, batches = [], iter(seat.loader(gated, 1, timeout=0.2))
    is_late = False
    while len(seen) < len(gated):
        try:
            seen += next(batches).tolist()
        except RuntimeError as error:  # also where the machine has no time for a worker
            assert "timed out after 0.2 seconds" in str(error)  # noqa: PT017
            if seen == [0, 1]:
                is_late = True
                gated.open()
    assert is_late
    assert seen == list(range(8))


@with_workers
def test_loop_that_waits_is_told_of_a_close(seat, gated):
    """By whichever thread; again and again, it is over."""
    children = set(multiprocessing.active_children())
    loader = seat.loader(gated, 1)
    batches = iter(loader)
    assert [next(batches).item() for _ in range(2)] == [0, 1]

    def close():
        until(lambda: is_waiting(batches))
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
