"""Processes that are forked from a trainer whose loader has a child: what they see and may do."""

import decimal
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest
import torch
from _datasets import Indices, Made
from _forks import fork, found_in_fork, outcome
from _isolated import bits, isolated, nothing_left, num_mapped_slabs, served
from _isolation_data import Images
from _loader_helpers import PATIENCE_SECONDS, ThreadLoader as DataLoader, torch_loader
from torch.utils.data import RandomSampler

from spdl_torch.engine.shared import lock_held_at_forks
from spdl_torch.loader.backends import activity as activity_module
from spdl_torch.loader.backends.activity import Activity
from spdl_torch.loader.backends.processes import worker_process
from spdl_torch.loader.backends.processes.process import start_child

__all__ = ["nothing_left"]

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")


@contextmanager
def forked(function):
    """A forked process that calls ``function`` on request; yields the request, and
    returns its result, or the error as text."""
    ours, theirs = multiprocessing.Pipe()

    def answer():
        ours.close()
        assert theirs.poll(PATIENCE_SECONDS)
        theirs.send(outcome(function))

    pid = fork(answer)

    def result():
        ours.send("go")
        assert ours.poll(PATIENCE_SECONDS)
        return ours.recv()

    try:
        yield result
    finally:
        ours.close()
        theirs.close()
        os.waitpid(pid, 0)


def seen_ten_batches_later(loader):
    """The batch that the trainer held when it forked, as it was, and in the fork much later."""
    batches = iter(loader)
    held = [next(batches)]
    at_first = bits(held[0])
    with forked(lambda: bits(held[0])) as seen:
        held.clear()
        # Kept, so that every slab that is free is needed.
        held += [next(batches) for _ in range(10)]
        return at_first, seen()


def test_batch_stays_what_it_was_in_a_forked_process():
    """As with torch's loader: whatever the trainer does with its own view meanwhile."""
    for make in (isolated, torch_loader):
        at_first, later = seen_ten_batches_later(make(Images(64), 4, num_workers=2))
        assert later == at_first


def test_memory_is_not_held_for_forks_that_are_many():
    """Freed slabs are unmapped: as many are mapped as without forks."""
    for number, batch in enumerate(isolated(Images(64), 4)):
        with forked(lambda: None) as done:
            del batch
            done()
        assert number < 10 or num_mapped_slabs() <= 4 + 4 + 1


class KeptForThread:
    """An object with threads of its own, for which it waits when it is deleted: in a process that
    was forked they are missing, and it waits for ever. FFmpeg's scaler is such a one."""

    def __init__(self):
        self.pid = os.getpid()

    def __del__(self):
        if os.getpid() != self.pid:
            threading.Event().wait()


@pytest.fixture
def kept():
    """Such an object, in a thread-local variable of this thread."""
    local = threading.local()
    local.kept = KeptForThread()
    yield
    del local.kept


def test_worker_keeps_what_the_program_keeps_for_its_thread(kept):
    """The worker is a copy of the thread that asks for batches, as torch's is."""
    for make in (torch_loader, isolated):
        assert len(list(make(Images(8), 4, num_workers=2))) == 2


class Seen(Images):
    """Images with the process that made each, and the precision of its decimals."""

    def __getitem__(self, index):
        return super().__getitem__(index), os.getpid(), decimal.getcontext().prec


def test_worker_that_replaces_a_killed_one_is_a_copy_of_the_same_thread(kept):
    """Of the loop's, wherever the loop is at that moment."""
    with decimal.localcontext() as context:
        context.prec = 40
        loader = isolated(Seen(64), None, num_workers=2)
        batches = iter(loader)
        first = [next(batches) for _ in range(8)]
        os.kill(first[0][1], signal.SIGKILL)
        rest = list(batches)
    assert len(rest) == 56
    assert {precision for *_, precision in (*first, *rest)} == {40}
    assert len({pid for _, pid, _ in (*first, *rest)}) == 3


def test_processes_take_no_threads_of_the_trainer(monkeypatch):
    """Each is a copy of a process with the threads that it had, and no others."""
    beside = []

    def start(*arguments):
        beside.append({each.name for each in threading.enumerate()})
        return start_child(*arguments)

    monkeypatch.setattr(worker_process, "start_child", start)
    before = {each.name for each in threading.enumerate()}
    assert len(list(isolated(Images(9), num_workers=3))) == 9
    assert beside == [before] * 3


def test_loader_runs_in_a_forked_process():
    """Whose parent has a fork server that is not a child of this one: there is another way."""
    list(served(Images(4), 4))  # the server runs
    expected = [bits(batch) for batch in DataLoader(Images(8), 4, num_workers=2, seed=1)]

    def load():
        with pytest.raises(RuntimeError, match="server belongs to the process from which"):
            iter(served(Images(8), 4))
        found = [[bits(batch) for batch in isolated(Images(8), 4, seed=1)]]
        multiprocessing.set_start_method("forkserver", force=True)  # Python's own, from 3.14 on
        one = isolated(Images(8), 4, num_workers=1, seed=1)  # a new Python, which takes seconds
        return [*found, [bits(batch) for batch in one]]

    with forked(load) as found:
        assert found() == [expected, expected]


def test_daemonic_process_may_start_none_and_the_error_says_so():
    """Such as a worker of torch's loader."""
    with forked(in_a_daemon) as answer:
        assert "forbids in a daemonic process, such as a worker of a DataLoader" in answer()


def in_a_daemon():
    """Ask for a child where multiprocessing allows none."""
    multiprocessing.current_process().daemon = True
    with pytest.raises(RuntimeError, match='Pass isolation="thread"') as caught:
        iter(isolated(Images(4)))
    return str(caught.value)


COUNTS_WARNINGS = """
import threading, warnings
from torch.utils.data import DataLoader as TorchDataLoader, Dataset
from spdl_torch import DataLoader

class Numbers(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return index

def count(loader):
    found = []
    warnings.showwarning = lambda text, *_: found.append(str(text))
    assert [batch.tolist() for batch in loader(Numbers(), num_workers=2)] == [[0], [1], [2], [3]]
    assert all("multi-threaded" in each for each in found), found
    return len(found)

both = TorchDataLoader, DataLoader
alone = [count(loader) for loader in both]
before = list(warnings.filters)
threading.Thread(target=threading.Event().wait, daemon=True).start()
print(alone, [count(loader) for loader in both], before == warnings.filters)
"""


@pytest.mark.skipif(sys.version_info < (3, 12), reason="Python does not warn of forks")
@pytest.mark.parametrize("action", ["always", "error"])
def test_no_warning_of_forks_that_torch_would_not_give(action):
    """Our threads are none to be warned of, the program's own are. Where warnings are errors,
    Python forks all the same."""
    done = subprocess.run(
        [sys.executable, "-W", f"{action}::DeprecationWarning", "-c", COUNTS_WARNINGS],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    expected = "[0, 0] [2, 2] True" if action == "always" else "[0, 0] [0, 0] True"
    assert done.stdout.strip() == expected, done.stderr[-3000:]


@pytest.mark.parametrize("is_in_the_middle", [False, True])
@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_persistent_workers_stay_with_the_process_that_started_them(isolation, is_in_the_middle):
    """A forked process has workers of its own from its first iter() on; the trainer's go on."""
    loader = DataLoader(
        Indices(8),
        4,
        sampler=RandomSampler(range(8), generator=torch.Generator().manual_seed(3)),
        num_workers=2,
        persistent_workers=True,
        isolation=isolation,
        multiprocessing_context="fork" if isolation == "process" else None,
    )
    batches = iter(loader)
    seen = next(batches).tolist()
    if not is_in_the_middle:
        seen += torch.cat(list(batches)).tolist()
    with forked(lambda: [batch.tolist() for _ in range(2) for batch in loader]) as there:
        found = there()
    if is_in_the_middle:
        seen += torch.cat(list(batches)).tolist()
    assert sorted(seen) == list(range(8))
    assert found == [batch.tolist() for _ in range(2) for batch in loader]
    loader.close()


LOCK = threading.Lock()


def hold(index):
    """Hold a lock of the process most of the time, as libraries do inside their calls."""
    with LOCK:
        threading.Event().wait(0.002)
    return index


def is_free(index):
    """Whether the lock can be had in a child, where the thread that held it does not exist."""
    is_free = LOCK.acquire(timeout=0.5)
    if is_free:
        LOCK.release()
    return is_free


def num_stuck(num_forks):
    """Return how many of the children found the lock held for ever."""
    holders = iter(DataLoader(Made(hold, 1_000_000), batch_size=2, num_workers=3))
    stuck = 0
    for _ in range(num_forks):
        next(holders)
        stuck += not all(next(iter(isolated(Made(is_free, 2), batch_size=2, num_workers=1))))
    return stuck


def test_no_lock_of_a_worker_thread_stays_held_in_a_child():
    """Workers are between two jobs when the process is forked."""
    assert num_stuck(6) == 0


def test_a_fork_waits_for_a_long_sample_only_so_long(monkeypatch):
    """A worker that never finishes its job does not keep other loaders from starting."""
    monkeypatch.setattr(activity_module, "_LONGEST_SECONDS", 0.05)
    entered, may_end = threading.Event(), threading.Event()

    def block(index):
        entered.set()
        assert may_end.wait(30)
        return index

    iterator = iter(DataLoader(Made(block, 2), batch_size=2, num_workers=1))
    assert entered.wait(30)
    assert len(list(isolated(Indices(4), num_workers=1))) == 4
    may_end.set()
    next(iterator)


def test_workers_rest_until_the_last_of_several_forks_has_ended():
    """Two loaders that start children on threads of their own fork at the same time."""
    activity, begun = Activity(), threading.Event()

    def begin():
        activity_module.begin_job(activity, "a job")
        begun.set()

    worker = threading.Thread(target=begin)
    with activity_module.workers_at_rest():
        with activity_module.workers_at_rest():
            worker.start()
        # It waits, or it has begun: what it will do is settled, and needs no wait.
        assert not activity_module.may_work.is_set()
    assert begun.wait(30)
    worker.join()
    assert activity.job == "a job"


def test_child_finds_no_lock_held_by_a_thread_that_it_has_not_got():
    """The fork waits until the thread has let go of it."""
    lock, is_held, may_end = lock_held_at_forks(), threading.Event(), threading.Event()

    def hold():
        with lock:
            is_held.set()
            may_end.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    is_held.wait()
    may_end.set()
    assert found_in_fork(lambda: lock.acquire(blocking=False)) is True
    thread.join()
    with lock:
        pass
