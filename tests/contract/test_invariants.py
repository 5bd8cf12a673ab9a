"""What holds of a loader's iterator at any time, in every seat that has it.

Of the sixteen promises some have tests of their own. They are named here, each once:

2. No child waits while it has a job, whatever the sizes: ``test_worker_processes``
   (``test_trainer_does_not_wait_...``, ``test_messages_of_any_size_...``).
3. Ctrl-C at every call: ``test_loader_interrupts`` (``test_iterator_that_ctrl_c_meets_...``,
   ``test_state_after_ctrl_c_...``).
4. Nothing is left after it: ``test_isolation_interrupts``; the trainer
   has its generators: ``test_loader_interrupts``.
6. Errors leave the iterator running, a death ends it once: ``test_hook_errors``.
8. A child ends with its trainer: ``test_isolation_ends`` (``test_nothing_is_left_when_...``).
9. A forked process leaves the children alone: ``test_isolation_ends``, ``test_isolation_forks``.
10. Slabs and descriptors are flat: ``test_isolation`` (``test_descriptors_and_slabs_...``),
    ``test_dataloader_contract`` (``test_many_broken_epochs_...``).
11. A killed child's batches are made again: ``test_worker_processes``.
12. Bits, order and states are those without workers: ``test_seats``, ``test_rng_seats``,
    ``test_resume_seats``.
13. Nothing warns where torch's loader does not: all tests run with warnings as errors;
    ``test_isolation_forks`` (``test_no_warning_of_forks_...``).
14. What is said of a long wait: ``test_stalls``, ``test_isolation_ends``.
15. Datasets, iterators, samples and errors go with their last reference: ``test_seats``,
    ``test_loader_lifetimes``.
16. Figures of processes: ``test_stats``, ``test_isolation`` (``test_figures_are_those_of_...``).
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import threading
from contextlib import suppress

import pytest
from _at_call import AtCall
from _datasets import IndexStream, Indices, RecordingSampler
from _gates import until
from _seats import SEATS, in_every_seat, in_every_seat_by_pairs, in_seats
from torch.utils.data import Dataset

from spdl_torch.pipeline import PipelineStopped

LENGTH = 40
with_workers = in_seats(*(seat for seat in SEATS if seat.num_workers))


def step_of(seat):
    """To look at every place takes long where each look starts processes."""
    return 23 if seat.are_processes else 7 if seat.are_threads else 1


# 1. From iter() on, as many jobs are out while the step runs as torch's loader has; the sampler has
# been asked as often.


@in_every_seat_by_pairs(prefetch_factor=[1, 2], batch_size=[None, 2])
def test_sampler_is_pulled_where_torch_pulls_it(seat, prefetch_factor, batch_size):
    """By the loop alone: a fixed number at iter(), then one per batch, before it is handed over."""
    pulls = []
    for make in (seat.loader, seat.peer):
        sampler = RecordingSampler(list(range(24)))
        options = {"sampler": sampler, "prefetch_factor": prefetch_factor}
        batches = iter(make(Indices(24), batch_size, **options))
        pulls.append([sampler.pulled, *(sampler.pulled for _ in batches)])
        assert sampler.threads == {threading.get_ident()}
    assert pulls[0] == pulls[1]
    assert pulls[0][0] == prefetch_factor * seat.num_workers * (batch_size or 1)


# 3. A handler that takes a state and returns.


@in_every_seat
@pytest.mark.parametrize("kind", [Indices, IndexStream])
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


# 4. Ctrl-C is of one iterator: every other loader goes on.


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
    """Indices, one of which waits until somebody opens its pipe for writing."""

    thread_safe = True

    def __init__(self, gate, held):
        self.gate, self.held = gate, held

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == self.held:
            with open(self.gate, encoding="ascii") as gate:
                gate.read()
        return index

    def open(self):
        """Let whoever waits go on, and whoever comes later wait."""
        os.close(os.open(self.gate, os.O_RDWR | os.O_NONBLOCK))


@pytest.fixture
def gated(tmp_path):
    """Its third sample waits."""
    os.mkfifo(tmp_path / "gate")
    dataset = Gated(str(tmp_path / "gate"), 2)
    yield dataset
    dataset.open()


# 5. After a timeout the batch still comes.


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


# 7. close() from any thread ends the wait of the loop, and starts nobody.


@with_workers
def test_loop_that_waits_is_told_of_a_close(seat, gated):
    """By whichever thread; again and again, it is over."""
    children = set(multiprocessing.active_children())
    loader = seat.loader(gated, 1)
    batches = iter(loader)
    assert [next(batches).item() for _ in range(2)] == [0, 1]
    closing = threading.Thread(target=loader.close)
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
