"""Processes that are forked from a trainer whose loader has a child: what they see and may do."""

import decimal
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from multiprocessing import util

import pytest
import torch
from support.datasets import GatedData, Images, Indices, Made
from support.forks import fork, found_in_fork, outcome
from support.gates import in_thread, result_of
from support.isolated import bits, isolated, nothing_left, num_mapped_slabs, served
from support.loaders import PATIENCE_SECONDS, ThreadLoader as DataLoader, torch_loader
from torch.utils.data import RandomSampler

from spdl_torch.loader.backends import activity as activity_module
from spdl_torch.locks import lock_held_at_forks

__all__ = ["nothing_left"]

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")


@contextmanager
def forked(function):
    """A forked process that calls ``function`` on request; yields the request, which returns its
    result, or the error as text."""
    ours, theirs = multiprocessing.Pipe()

    def answer():
        ours.close()
        assert theirs.poll(PATIENCE_SECONDS)
        theirs.send(outcome(function))

    def result():
        ours.send("go")
        assert ours.poll(PATIENCE_SECONDS)
        return ours.recv()

    pid = fork(answer)
    with ours, theirs:
        yield result
    os.waitpid(pid, 0)


@pytest.mark.parametrize("make", [isolated, torch_loader])
def test_batch_stays_what_it_was_in_a_forked_process(make):
    """As with torch's loader: whatever the trainer does with its own view meanwhile."""
    batches = iter(make(Images(64), 4, num_workers=2))
    held = [next(batches)]
    at_first = bits(held[0])
    with forked(lambda: bits(held[0])) as seen:
        held.clear()
        # Kept, so that every slab that is free is needed.
        held += [next(batches) for _ in range(10)]
        assert seen() == at_first


class KeptForThread:
    """An object with threads of its own, for which it waits when it is deleted: in a process that
    was forked they are missing, and it waits for ever. FFmpeg's scaler is such a one."""

    def __init__(self):
        self.pid = os.getpid()

    def __del__(self):
        if os.getpid() != self.pid:
            threading.Event().wait()


class Seen(Images):
    """Images with the process that made each, and the precision of its decimals."""

    def __getitem__(self, index):
        return super().__getitem__(index), os.getpid(), decimal.getcontext().prec


def test_worker_is_a_copy_of_the_thread_that_asks_for_batches():
    """As torch's is, and keeps what the program keeps for that thread; so does one that replaces a
    killed one, wherever the loop is at that moment."""
    local = threading.local()
    local.kept = KeptForThread()
    with decimal.localcontext() as context:
        context.prec = 40
        batches = iter(isolated(Seen(64), None, num_workers=2))
        first = [next(batches) for _ in range(8)]
        os.kill(first[0][1], signal.SIGKILL)
        rest = list(batches)
    del local.kept
    assert len(rest) == 56
    assert {precision for *_, precision in (*first, *rest)} == {40}
    assert len({pid for _, pid, _ in (*first, *rest)}) == 3


def test_loader_runs_in_a_forked_process():
    """Whose parent has a fork server that is not a child of this one: that is an error."""
    list(served(Images(4), 4))  # the server runs
    expected = [bits(batch) for batch in DataLoader(Images(8), 4, num_workers=2, seed=1)]

    def load():
        with pytest.raises(RuntimeError, match="server belongs to the process from which"):
            iter(served(Images(8), 4))
        return [bits(batch) for batch in isolated(Images(8), 4, seed=1)]

    with forked(load) as found:
        assert found() == expected


def test_loader_in_a_forked_process_leaves_the_children_of_a_dropped_one_to_the_parent():
    """Which were told to end before the fork, and have not been seen to."""
    next(iter(isolated(Images(8), 1, num_workers=1)))
    assert found_in_fork(lambda: len(list(isolated(Images(8), 4)))) == 2


def in_a_daemon():
    """Ask for a child where multiprocessing allows none."""
    multiprocessing.current_process().daemon = True
    iter(isolated(Images(4)))


def test_daemonic_process_may_start_none_and_the_error_says_so():
    """Such as a worker of torch's loader."""
    error = found_in_fork(in_a_daemon)
    assert "forbids in a daemonic process, such as a worker of a DataLoader" in error
    assert 'Pass isolation="thread"' in error


COUNTS_WARNINGS = """
import threading, warnings
from functools import partial
from torch.utils.data import DataLoader as TorchDataLoader
from spdl_torch import DataLoader

def count(loader):
    found = []
    warnings.showwarning = lambda text, *_: found.append(str(text))
    assert [batch.tolist() for batch in loader(range(4), num_workers=2)] == [[0], [1], [2], [3]]
    assert all("multi-threaded" in each for each in found), found
    return len(found)

both = TorchDataLoader, partial(DataLoader, isolation="process")
alone = [count(loader) for loader in both]
before = list(warnings.filters)
threading.Thread(target=threading.Event().wait, daemon=True).start()
print(alone, [count(loader) for loader in both], before == warnings.filters)
"""


@pytest.mark.skipif(sys.version_info < (3, 12), reason="Python does not warn of forks")
@pytest.mark.parametrize("action", ["always", "error"])
def test_forks_give_no_warning(action):
    """Neither of our threads nor of the program's own, of which torch's give one. Where warnings
    are errors, Python forks all the same."""
    done = subprocess.run(
        [sys.executable, "-W", f"{action}::DeprecationWarning", "-c", COUNTS_WARNINGS],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    expected = "[0, 0] [2, 0] True" if action == "always" else "[0, 0] [0, 0] True"
    assert done.stdout.strip() == expected, done.stderr[-3000:]


@pytest.mark.parametrize("is_in_the_middle", [False, True])
@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_workers_stay_with_the_process_that_started_them(isolation, is_in_the_middle):
    """Though at a fork's end multiprocessing ends its children. An iterator there says what it
    lacks; from its first iter() on a fork has workers of its own, and the trainer's go on."""
    order = RandomSampler(range(8), generator=torch.Generator().manual_seed(3))
    options = {"sampler": order, "persistent_workers": True, "isolation": isolation}
    loader = DataLoader(Indices(8), 4, num_workers=2, **options)
    batches = iter(loader)
    seen = next(batches).tolist()
    if not is_in_the_middle:
        seen += torch.cat(list(batches)).tolist()
        batches = iter(loader)
    assert found_in_fork(util._exit_function) is None
    ended = "PipelineStopped: DataLoader: its workers did not follow into a forked process"
    assert found_in_fork(lambda: next(batches)).startswith(ended)
    there = found_in_fork(lambda: [batch.tolist() for _ in range(2) for batch in loader])
    rest = torch.cat(list(batches)).tolist()
    whole = [seen + rest] if is_in_the_middle else [seen, rest]
    assert [sorted(epoch) for epoch in whole] == [list(range(8))] * len(whole)
    assert there == [batch.tolist() for _ in range(2) for batch in loader]
    loader.close()


LOCK = threading.Lock()


def hold(index):
    """Hold a lock of the process most of the time, as libraries do inside their calls."""
    with LOCK:
        threading.Event().wait(0.002)
    return index


def is_free(index):
    """Whether the lock can be had in a child, where the thread that held it does not exist."""
    if is_free := LOCK.acquire(timeout=0.5):
        LOCK.release()
    return is_free


def test_no_lock_of_a_worker_thread_stays_held_in_a_child():
    """Workers are between two jobs when the process is forked."""
    holders = iter(DataLoader(Made(hold, 1_000_000), batch_size=2, num_workers=3))
    for _ in range(6):
        next(holders)
        assert all(next(iter(isolated(Made(is_free, 2), batch_size=2, num_workers=1))))


def test_a_fork_waits_for_a_long_sample_only_so_long(monkeypatch):
    """A worker that never finishes its job does not keep other loaders from starting."""
    monkeypatch.setattr(activity_module, "_LONGEST_SECONDS", 0.05)
    dataset = GatedData(2)
    batches = iter(DataLoader(dataset, batch_size=2, num_workers=1))
    assert dataset.entered.wait(PATIENCE_SECONDS)
    assert len(list(isolated(Indices(4), num_workers=1))) == 4
    dataset.gate.set()
    next(batches)


def test_child_finds_no_lock_held_by_a_thread_that_it_has_not_got():
    """The fork waits until the thread has let go of it."""
    lock, is_held, may_end = lock_held_at_forks(), threading.Event(), threading.Event()

    def hold():
        with lock:
            is_held.set()
            may_end.wait()

    holding = in_thread(hold)
    is_held.wait()
    may_end.set()
    assert found_in_fork(lambda: lock.acquire(blocking=False)) is True
    result_of(holding)
    with lock:
        pass


def test_workers_rest_until_the_last_of_several_forks_has_ended():
    """Two loaders that start children on threads of their own fork at the same time."""
    activity = activity_module.Activity()
    with activity_module.workers_at_rest():
        with activity_module.workers_at_rest():
            begun = in_thread(activity_module.begin_job, activity, "a job")
        # It waits, or it has begun: what it will do is settled, and needs no wait.
        assert not activity_module.may_work.is_set()
    result_of(begun)
    assert activity.job == "a job"


def test_memory_is_not_held_for_forks_that_are_many():
    """Freed slabs are unmapped: as many are mapped as without forks."""
    for number, batch in enumerate(isolated(Images(64), 4)):
        with forked(lambda: None) as done:
            del batch
            done()
        assert number < 10 or num_mapped_slabs() <= 4 + 4 + 1
