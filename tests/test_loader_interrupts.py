"""Ctrl-C at random moments of loading: nothing is left, nothing hangs, no sample comes twice."""

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from _fuzz import LONG_TIMEOUT
from _loader_helpers import PATIENCE_SECONDS

from spdl_torch.pipeline.threads.starting import start

PROGRAM = Path(__file__).with_name("_interrupts.py")
LONG_COUNT = {"thread": 500, "process": 500}


def interrupted(count, seed, isolation, patience):
    """What the program found."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", PROGRAM, str(count), str(seed), isolation],
        capture_output=True,
        text=True,
        timeout=patience,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return json.loads(done.stdout)


def assert_nothing_left(told, count):
    assert told["interrupted"] == count
    assert told["left"] == []
    assert told["descriptors"] <= 0


def test_nothing_is_left_after_random_interrupts():
    """The short form."""
    assert_nothing_left(interrupted(40, 1, "thread", 4 * PATIENCE_SECONDS), 40)


@pytest.mark.fuzz
@pytest.mark.timeout(LONG_TIMEOUT)
@pytest.mark.parametrize("isolation", LONG_COUNT)
def test_nothing_is_left_after_many_random_interrupts(isolation):
    """Others in every run, of threads and of children."""
    count = LONG_COUNT[isolation]
    told = interrupted(count, threading.get_native_id(), isolation, LONG_TIMEOUT)
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
