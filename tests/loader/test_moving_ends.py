"""Ends in every state of moving, of the loop and of a child: nothing is left, and no batch is lost.

The states are forced, as in ``test_moving.py``. What ends is waited for by its own notification.
"""

import gc
import logging
import multiprocessing
import os
import signal

import pytest
from _folders import HELPERS
from _gates import num_fds, until
from _inside import crew_of, mover_of
from _isolated import nothing_left, num_mapped_slabs
from _loader_helpers import PATIENCE_SECONDS, assert_threads_end, loader_threads, run_script
from _seats import start_children
from test_isolation_forks import forked
from test_moving import Draws, expected, loader_of, rows_of

from spdl_torch.data.loader.mover import State

__all__ = ["nothing_left"]

pytestmark = [
    pytest.mark.skipif(
        "fork" not in multiprocessing.get_all_start_methods(),
        reason="workers move where they can be forked",
    ),
    pytest.mark.usefixtures("forks_by_default"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]

MOMENTS = ["threads", "starting", "trial", "moved", "returned"]


def reach(loader, moment):
    """Return an epoch's iterator in one of the states, and the batches on the way there."""
    iterator = iter(loader)
    mover = mover_of(iterator)
    mover.due_seconds = float("inf")  # nothing by itself
    batches = [next(iterator)]
    if moment != "threads":
        start_children(mover)
    if moment in ("trial", "moved", "returned"):
        batches.append(next(iterator))  # hands the work over
        mover.due_seconds = float("inf")
        while mover.num_threads_left:
            batches.append(next(iterator))
    if moment == "moved":
        mover.go(State.CHILDREN)
        mover.memory.moved(2.4)
    if moment == "returned":
        mover.memory.stays("the loop was 0.61 times as fast with processes")
        mover.return_to_threads(crew_of(iterator))
        batches.append(next(iterator))
    return iterator, batches


def children():
    """The worker processes that live now."""
    return [each for each in multiprocessing.active_children() if each.name == "spdl-loader"]


def assert_ended(processes):
    """Wait until the system says so of each."""
    for process in processes:
        process.join(PATIENCE_SECONDS)
        assert process.exitcode is not None


def interrupted_loop(iterator):
    for _ in iterator:
        signal.raise_signal(signal.SIGINT)


def failing_loop(iterator):
    for _ in iterator:
        raise ZeroDivisionError("the loop's own")


def leave(iterator, way):
    """End the loop in one of the ways."""
    if way == "break":
        for _ in iterator:
            break
    elif way == "error":
        with pytest.raises(ZeroDivisionError, match="the loop's own"):
            failing_loop(iterator)
    elif way == "Ctrl-C":
        with pytest.raises(KeyboardInterrupt):
            interrupted_loop(iterator)
    elif way == "end":
        for _ in iterator:
            pass


@pytest.fixture(scope="module")
def _made_once():
    """What is made once for the process, by the first loader that moves."""
    leave(reach(loader_of(Draws(60)), "trial")[0], "end")
    assert_threads_end()


@pytest.mark.usefixtures("_made_once")
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("way", ["drop", "break", "error", "Ctrl-C", "end"])
def test_nothing_is_left_in_any_state(moment, way):
    """No child, thread, descriptor or shared memory, however the loop ends."""
    before = num_fds()
    iterator = reach(loader_of(Draws(60)), moment)[0]  # no batch, which may view shared memory
    processes, threads = children(), loader_threads()
    assert bool(processes) is (moment != "threads")
    leave(iterator, way)
    del iterator
    gc.collect()
    assert_threads_end(threads)
    assert_ended(processes)
    assert (num_fds(), num_mapped_slabs()) == (before, 0)


@pytest.mark.parametrize("moment", MOMENTS)
def test_fork_of_the_trainer_leaves_the_loop_alone(moment):
    """What the forked process drops belongs to the trainer, whose batches go on."""
    loader = loader_of()
    held = list(reach(loader, moment))

    def drop():
        held.clear()
        gc.collect()
        return [thread.name for thread in loader_threads() if thread.is_alive()], num_fds()

    with forked(drop) as dropped:
        threads, _ = dropped()
    assert threads == []
    iterator, batches = held
    assert rows_of([*batches, *iterator]) == expected()


AT_EXIT = """
import sys
sys.path[:0] = {folders!r}
from test_moving_ends import MOMENTS, loader_of, reach
from test_moving import Draws

if __name__ == "__main__":
    held = [reach(loader_of(Draws(400)), moment) for moment in MOMENTS]
    print(len(held))
"""


def test_interpreter_exits_in_every_state():
    """With an iterator in each. The children have the script's output, which ends when they have
    ended."""
    done = run_script(AT_EXIT.format(folders=[str(HELPERS), os.path.dirname(__file__)]))
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, str(len(MOMENTS)), "")


@pytest.mark.parametrize("moment", ["starting", "trial", "moved"])
def test_batches_of_a_child_that_is_killed_are_made_again(moment, caplog):
    """Before the trial, during it and after it, with equal bits; once the child has had work, it is
    logged and reported."""
    loader = loader_of(timeout=PATIENCE_SECONDS)
    iterator, batches = reach(loader, moment)
    victim = children()[0]
    os.kill(victim.pid, signal.SIGKILL)
    if moment == "starting":
        until(lambda: mover_of(iterator).hiring.children.early_death is not None)
        mover_of(iterator).due_seconds = 0.0  # the work is handed over to those who are there
    else:  # not its sentinel, which the loader closes and the successor's may replace
        until(lambda: "was killed by SIGKILL" in caplog.text)
    for batch in iterator:
        mover_of(iterator).due_seconds = float("inf")
        batches.append(batch)
    assert rows_of(batches) == expected()
    assert moment == "starting" or "killed" in str(loader.report())


LIVE = "DataLoader: the workers live on 2 threads of the training process: "
MOVED = "the GIL held the threads up, and with processes the loop was 2.40 times as fast"
TOLD = {
    "threads": [f"{LIVE}Draws says thread_safe = True."],
    "moved": [
        f"{LIVE}Draws says thread_safe = True.",
        f"DataLoader: the workers have moved to processes: {MOVED}.",
    ],
    "returned": [
        f"{LIVE}Draws says thread_safe = True.",
        "DataLoader: the workers stay on threads: the loop was 0.61 times as fast with processes.",
    ],
}


@pytest.mark.parametrize("moment", TOLD)
def test_log_has_a_line_where_workers_live_and_one_when_they_move(moment, caplog):
    """At INFO, with the reason, and not again in the next epoch, where they stay."""
    with caplog.at_level(logging.INFO, "spdl_torch.data"):
        loader = loader_of()
        for _ in reach(loader, moment)[0]:
            pass
        list(loader)
    assert [each.getMessage() for each in caplog.records] == TOLD[moment]
