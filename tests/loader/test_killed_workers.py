"""Whoever is killed: the batches are those without workers, or an error says who died, and of what;
and nothing is left."""

import gc
import os
import re
import resource
import signal
import threading
from contextlib import nullcontext
from pathlib import Path

import psutil
import pytest
import torch
from support.datasets import Crashing, Images, Made
from support.gates import is_running, num_fds, until
from support.inside import are_up, backend_of, children_of
from support.isolated import (
    bits,
    children,
    epochs_of,
    isolated,
    nothing_left,
    release_what_has_ended,
)
from support.loaders import PATIENCE_SECONDS, DataLoader, assert_threads_end
from torch.utils.data import IterableDataset

from spdl_torch.loader.backends.processes import worker_process
from spdl_torch.observe import tracing

__all__ = ["nothing_left"]

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
REPLACED = {"seed": 1, "timeout": PATIENCE_SECONDS}
SERVED = {**REPLACED, "multiprocessing_context": "forkserver"}


class DiesOnce(Images):
    """The process that makes sample 13 first is killed by it."""

    def __init__(self, folder):
        super().__init__()
        self.mark = Path(folder) / "died"

    def __getitem__(self, index):
        if index == 13 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def test_batches_of_a_child_that_is_killed_are_made_again(tmp_path, caplog):
    """With equal bits; the log names the signal and the batches, the report counts it, and the next
    epoch knows nothing of it."""
    (tmp_path / "died").touch()
    expected = epochs_of(DataLoader(DiesOnce(tmp_path), 4, seed=1))
    (tmp_path / "died").unlink()
    loader = isolated(DiesOnce(tmp_path), 4, num_workers=3, persistent_workers=True, **REPLACED)
    assert epochs_of(loader, 1) == expected[:1]
    (record,) = [each for each in caplog.records if "killed" in each.message]
    assert "was killed by SIGKILL" in record.message
    made_again = record.message.rpartition("its batches again: ")[2].rstrip(".").split(", ")
    assert "3" in made_again  # of samples 12 to 15
    assert "killed" in str(loader.report())
    assert epochs_of(loader, 1) == expected[1:]
    assert "killed" not in str(loader.report())


def test_child_that_is_killed_between_two_epochs_is_replaced_and_logged(caplog):
    """By the next epoch, whose batches are as ever."""
    loader = isolated(Images(8), 2, persistent_workers=True, **REPLACED)
    epochs = [list(map(bits, batches := iter(loader)))]
    os.kill(pid := children_of(batches)[1].pid, signal.SIGKILL)
    until(lambda: not is_running(pid))
    epochs.append(list(map(bits, loader)))
    assert epochs == epochs_of(DataLoader(Images(8), 2, seed=1), 2)
    (told,) = caplog.messages
    assert re.search(rf"pid {pid}\) was killed by SIGKILL", told)


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_batch_that_always_kills_its_child_is_an_error(caplog, method):
    """After the second child, be it a new one or another, with the indices of the batch; asked
    again, the iterator has ended."""
    options = {"timeout": PATIENCE_SECONDS, "multiprocessing_context": method}
    batches = iter(isolated(Crashing(signal.SIGKILL), 1, **options))
    named = r"was killed by SIGKILL(.|\n)*next batch was batch 5, indices \[5\]"
    with pytest.raises(RuntimeError, match=named):
        list(batches)
    assert list(batches) == []
    # The other one may have been killed, too, before the first one's end was logged.
    until(lambda: "its batches again: 5" in caplog.text)
    assert caplog.text.count("its batches again: 5") == 1


class DyingStream(IterableDataset):
    """Its third item kills."""

    def __iter__(self):
        yield from range(2)
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("rng", ["sample", "worker"])
def test_child_whose_work_depends_on_its_past_is_not_replaced(rng, tmp_path):
    """An iterable's iterator, and a worker's random stream, are gone with it: an error, no other
    batches."""
    dataset = DiesOnce(tmp_path) if rng == "worker" else DyingStream()
    with pytest.raises(RuntimeError, match="was killed by SIGKILL"):
        list(isolated(dataset, 4, rng=rng))


DEATHS = [
    (signal.SIGKILL, "was killed by SIGKILL.*memory"),
    (signal.SIGSEGV, "was killed by SIGSEGV"),
    (35, "was killed by signal 35"),  # one of those without a name
]


@pytest.mark.parametrize(("how", "message"), DEATHS)
def test_death_of_the_only_child_is_an_error(how, message):
    """It says how and how to go on; after it the epoch is over, and nobody takes it for a whole
    one. A persistent loader has a new child for the next."""
    loader, had = isolated(Crashing(how), 1, num_workers=1, persistent_workers=True), []
    batches = iter(loader)
    with pytest.raises(RuntimeError, match=rf"the worker process \(pid \d+\) {message}"):
        had.extend(batches)
    assert next(batches, None) is None
    state = loader.state_dict()
    assert (state["finished"], state["num_samples"]) == (False, len(had))
    assert next(iter(loader)).item() == 0


def test_death_that_no_batch_told_of_is_not_the_next_epochs():
    """The loop has a batch that came before, and breaks: a persistent loader begins anew."""
    loader = isolated(Images(8), 2, num_workers=1, persistent_workers=True, **REPLACED)
    batches = iter(loader)
    next(batches)
    until(lambda: children_of(batches)[0].page.idle_since_ns)  # it has made what it was given
    os.kill(pid := children_of(batches)[0].pid, signal.SIGKILL)
    # With all of its threads, the last of which closes its socket: that its end is heard of.
    until(lambda: not is_running(pid) and psutil.Process(pid).num_threads() == 1)
    next(batches)
    assert list(map(bits, loader)) == epochs_of(DataLoader(Images(8), 2, seed=1), 2)[1]


def leave(loader, how):
    """End an epoch in one of the ways. One of the two workers has made two batches by then, and
    the row of the first is in the trace."""
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    if how == "end":
        assert len(list(batches)) == 7
    elif how == "error":
        with pytest.raises(ZeroDivisionError, match="division"):
            sum(len(batch) / 0 for batch in batches)
    elif how == "break":
        for _ in batches:
            break
    elif how == "close":
        loader.close()
        assert children() == []
    # Else it is dropped.


@pytest.mark.parametrize("kind", ["anew", "persistent", "traced"])
def test_nothing_is_left_however_the_loop_ends(kind, tmp_path):
    """No child, thread or descriptor. A trace that is on has the rows of the processes, whoever
    keeps their iterator."""
    leave(isolated(Images(40), 4), "end")  # what a first loader opens for good
    release_what_has_ended()
    before, path = num_fds(), tmp_path / "trace.json"
    for how in ("end", "error", "break", "drop", "close"):
        with tracing(path, level="item") if kind == "traced" else nullcontext():
            leave(isolated(Images(40), 4, persistent_workers=kind == "persistent"), how)
        # The other of the two may not have begun.
        assert kind != "traced" or '"worker process[' in path.read_text(encoding="utf-8"), how
        gc.collect()
        assert_threads_end()
        release_what_has_ended()
        assert num_fds() == before, how


@pytest.fixture
def held_back(monkeypatch):
    """Once called, no child starts before the event that it returns is set."""
    begin, started = threading.Event(), worker_process.start_child

    def late(*args):
        assert begin.wait(PATIENCE_SECONDS)
        return started(*args)

    def hold_back():
        monkeypatch.setattr(worker_process, "start_child", late)
        return begin

    return hold_back


def test_others_make_the_batches_of_a_child_whose_successor_takes_long(held_back, caplog):
    """One that is not forked may import for seconds. The loop gets all its batches meanwhile, in
    order and with equal bits, and the successor gets work once it is there."""
    expected = epochs_of(DataLoader(Images(40), 2, seed=1), 1)[0]
    batches = iter(isolated(Images(40), 2, num_workers=3, **SERVED))
    found = [bits(next(batches)) for _ in range(3)]
    until(lambda: are_up(batches))
    begin = held_back()
    os.kill(children_of(batches)[1].pid, signal.SIGKILL)
    found += [bits(next(batches)) for _ in range(10)]
    until(lambda: "The others make its batches again: " in caplog.text)
    assert not children_of(batches)[1].jobs
    assert backend_of(batches).numbers_at_work() == [0, 2]
    begin.set()
    until(lambda: are_up(batches))
    assert backend_of(batches).numbers_at_work() == [0, 1, 2]
    assert found + list(map(bits, batches)) == expected


def test_epoch_begins_while_a_killed_child_has_no_successor_yet(held_back):
    """What the successor is told waits until it can be told: first what it begins with."""
    loader = isolated(Images(40), 2, persistent_workers=True, **SERVED)
    first = next(batches := iter(loader))
    begin = held_back()
    os.kill(children_of(batches)[1].pid, signal.SIGKILL)
    found = [list(map(bits, (first, *batches)))]
    batches = iter(loader)
    begin.set()
    until(lambda: are_up(batches) or backend_of(batches)._look_after())
    assert [*found, list(map(bits, batches))] == epochs_of(DataLoader(Images(40), 2, seed=1), 2)


def test_error_of_the_receiver_is_not_taken_for_the_childs_end():
    """The trainer may open no more files, so it cannot map what the child has written. The child
    is told to end, and not waited for until it is killed."""
    batches = iter(isolated(Made(lambda n: torch.zeros(1 if n < 4 else 50_000), 12), num_workers=1))
    next(batches)  # up to two more are on their way, small ones
    (child,) = children()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, before[1]))
        with pytest.raises(RuntimeError, match=r"could not receive what .*Too many open") as caught:
            list(batches)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert isinstance(caught.value.__cause__, OSError)
    assert child.exitcode == 0
