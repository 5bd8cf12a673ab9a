"""What the engine's tests share: ops that wait for the test, thread and file counts, children.

Nothing here sleeps. Where the engine itself has no event to wait for (a thread that has parked
inside a channel) ``until`` looks again and again; how often does not matter to the outcome.
"""

from __future__ import annotations

import gc
import logging
import os
import re
import sys
import sysconfig
import threading
from collections import Counter
from concurrent.futures import Future
from contextlib import contextmanager

import psutil

from spdl_torch.pipeline import Aggregator, PipelineBuilder

PATIENCE_SECONDS = 30
"""How long a test waits for a thing that must happen; never how long it should take."""


def named(value):
    """``repr`` without addresses: a test's name is the same in every run and every process."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


class Boom(Exception):
    """A user's exception, recognised by its argument."""


class GatedOp:
    """An op whose calls wait until the test opens the gate, and which counts them."""

    def __init__(self):
        self._gate = threading.Event()
        self._changed = threading.Condition()
        self.started = []
        self.finished = []
        self.num_running = 0
        self.max_running = 0

    def __call__(self, item):
        with self._changed:
            self.started.append(item)
            self.num_running += 1
            self.max_running = max(self.max_running, self.num_running)
            self._changed.notify_all()
        assert self._gate.wait(PATIENCE_SECONDS), "the test forgot to open the gate"
        with self._changed:
            self.num_running -= 1
            self.finished.append(item)
            self._changed.notify_all()
        return item

    def open(self):
        """Let every call go on, those to come included."""
        self._gate.set()

    def wait_started(self, count):
        """Wait until ``count`` calls have begun."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.started) >= count, PATIENCE_SECONDS)


class CountingSource:
    """``range(count)`` (endless by default) that knows how many items were taken from it."""

    def __init__(self, count=None):
        self.count = count
        self.num_taken = 0

    def __iter__(self):
        while self.count is None or self.num_taken < self.count:
            self.num_taken += 1
            yield self.num_taken - 1


class BlockedSource:
    """Yields ``items``, then blocks inside its own ``next()`` until released."""

    def __init__(self, *items):
        self.items = items
        self.blocked = threading.Event()
        self.released = threading.Event()

    def __iter__(self):
        yield from self.items
        self.blocked.set()
        assert self.released.wait(PATIENCE_SECONDS), "the test forgot to release the source"


class FakeClock:
    """Wall and thread CPU time that move only when a test or an op says so."""

    def __init__(self):
        self.wall_ns = 1_000
        self.cpu_ns = 0

    def advance(self, wall_ns, cpu_ns=0):
        """Let time pass."""
        self.wall_ns += wall_ns
        self.cpu_ns += cpu_ns

    def install(self, monkeypatch, *modules):
        """Replace the clock functions that ``modules`` imported."""
        for module in modules:
            for name, read in (
                ("perf_counter_ns", lambda: self.wall_ns),
                ("thread_time_ns", lambda: self.cpu_ns),
            ):
                if hasattr(module, name):
                    monkeypatch.setattr(module, name, read)


def in_thread(function, *args):
    """Call ``function`` on a thread of its own; returns a Future."""
    future = Future()

    def run():
        try:
            future.set_result(function(*args))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="test-helper", daemon=True).start()
    return future


def result_of(future):
    """What the thread returned or raised."""
    return future.result(PATIENCE_SECONDS)


def until(condition):
    """Wait for what no event tells: a thread that has parked inside the engine."""
    pause = threading.Event()
    for _ in range(PATIENCE_SECONDS * 1000):
        if condition():
            return
        pause.wait(0.001)
    raise AssertionError("what the test waits for never came true")


def is_gone(reference):
    """Whether the object of a weak reference is gone. On a free-threaded Python one that another
    thread than its maker's drops last waits for the maker to go on, or for a collection; and then
    what it alone held."""
    for _ in range(3 if sysconfig.get_config_var("Py_GIL_DISABLED") else 0):
        if reference() is None:
            break
        gc.collect()
    return reference() is None


def spdl_threads():
    """The engine's live threads."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("spdl-")]


def join_spdl_threads():
    """Wait for threads that a dropped pipeline has asked to end; fails if one does not."""
    for thread in spdl_threads():
        thread.join(PATIENCE_SECONDS)
    assert not spdl_threads()


def num_fds():
    """Open file descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


def is_running(pid):
    """Not if it has ended and whoever has inherited it has not asked for its end yet."""
    try:
        return psutil.Process(int(pid)).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def shared_memory_of(*pids):
    """Names in /dev/shm: all that the package gives, and those of torch that begin with the number
    of one of these processes. Tests run beside this one: their names, and the folder of caches in
    memory, which whoever needs one makes, are not in it."""
    if not os.path.isdir("/dev/shm"):
        return set()
    torchs = tuple(f"torch_{pid}_" for pid in pids)
    return {
        name
        for name in os.listdir("/dev/shm")
        if name.startswith(torchs) or ("spdl" in name and not name.startswith("spdl_torch-cache-"))
    }


@contextmanager
def no_leak():
    """Assert that there are no more threads and file descriptors than there were."""
    gc.collect()
    join_spdl_threads()
    threads, fds = threading.active_count(), num_fds()
    yield
    gc.collect()
    join_spdl_threads()
    until(lambda: threading.active_count() <= threads)  # the test's own may be about to end
    assert num_fds() <= fds


@contextmanager
def switching(seconds=1e-5):
    """Let threads take turns so often: far more often than usual, so that races show."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@contextmanager
def quiet_log():
    """Without the engine's log lines about dropped items."""
    logger = logging.getLogger("spdl_torch.pipeline")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def pipeline_of(source, *ops, sink=3, build=None, continuous=False, **pipe):
    """A pipeline of ``ops``, all piped with the same options."""
    builder = PipelineBuilder().add_source(source, continuous=continuous)
    for op in ops:
        builder.pipe(op, **pipe)
    return builder.add_sink(sink).build(**(build or {}))


def same(item):
    return item


async def asame(item):
    return item


def spread(item):
    yield item


async def aspread(item):
    yield item


class Each(Aggregator):
    """Passes each item on at once."""

    def accumulate(self, item):
        return item

    def flush(self):
        return None


class Hands:
    """A tuner that does what the test says."""

    interval, is_heard = None, True

    def attach(self, run):
        self.run = run
        return self

    def report_interval(self, runner):
        """The test decides."""


def multiset(items):
    """Items with their counts, whatever their order."""
    return Counter(map(repr, items))
