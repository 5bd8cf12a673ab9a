"""Ctrl-C at random moments of loading: nothing is left, nothing hangs, no sample comes twice."""

import json
import threading
from pathlib import Path

import _warm
import pytest
from _loader_helpers import PATIENCE_SECONDS

from spdl_torch.pipeline.threads.starting import start

PROGRAM = Path(__file__).with_name("_interrupts.py")
INTERRUPTS_PER_SECOND = 10
"""In the long form; those of child processes take a tenth of a second."""


HANG_SECONDS = 150
"""More than the program gives one round, after which it says where it hangs."""


def interrupted(count, seed, isolation, patience):
    """What the program found."""
    done = _warm.run(["-W", "ignore", PROGRAM, count, seed, isolation], timeout=patience)
    assert done.returncode == 0, done.stderr[-5000:]
    return json.loads(done.stdout)


def assert_nothing_left(told, count):
    assert told["interrupted"] == count
    assert told["left"] == []
    assert told["descriptors"] <= 0


@pytest.mark.timeout(2 * HANG_SECONDS)
def test_nothing_is_left_after_random_interrupts():
    """The short form."""
    assert_nothing_left(interrupted(25, 1, "thread", HANG_SECONDS), 25)


@pytest.mark.long
@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_nothing_is_left_after_many_random_interrupts(isolation, long_seconds):
    """Others in every run, of threads and of children."""
    count = round(INTERRUPTS_PER_SECOND * long_seconds)
    told = interrupted(count, threading.get_native_id(), isolation, 600)
    print(told)
    assert_nothing_left(told, count)


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
