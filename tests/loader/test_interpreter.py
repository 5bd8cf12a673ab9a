"""What is asked of the interpreter: runs of the collector and handlers of signals, none of which is
lost."""

import _signal
import _thread
import gc
import itertools
import os
import signal
import sys
import threading
from contextlib import contextmanager, nullcontext, suppress
from functools import partial

import pytest
from support.at_call import handled
from support.datasets import Indices
from support.forks import found_in_fork
from support.gates import in_thread, result_of

from spdl_torch import DataLoader, PipelineDataset
from spdl_torch.handlers import handlers_deferred
from spdl_torch.lazy_names import collected_later
from spdl_torch.machine.probes import Collections
from spdl_torch.observe import recording, recording_gc, tracing
from spdl_torch.pipeline import PipelineBuilder


@pytest.fixture(autouse=True)
def _no_callbacks_of_others():
    """Such as those of the library that makes examples, which are written in Python."""
    before = gc.callbacks.copy()
    gc.callbacks.clear()
    yield
    gc.callbacks[:] = before


class SignalAtStart:
    """Ctrl-C comes when a collection starts; no line of Python is run there."""

    start = property(partial(next, map(_thread.interrupt_main, itertools.repeat(signal.SIGINT))))
    stop = None


def is_heard(monkeypatch):
    """Whether Ctrl-C in a collection is raised, and not swallowed."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    callback = partial(getattr, SignalAtStart())
    gc.callbacks.insert(0, callback)
    try:
        gc.collect()
        for _ in range(100):
            pass
    except KeyboardInterrupt:
        return True
    finally:
        gc.callbacks.remove(callback)
    return False


@contextmanager
def loading():
    next(iterator := iter(DataLoader(list(range(100)), num_workers=2, isolation="thread")))
    yield iterator


@pytest.mark.parametrize(
    "observed",
    [
        lambda _: nullcontext(),
        lambda _: loading(),
        lambda _: recording_gc(lambda _: None),
        lambda path: tracing(path / "trace.json"),
        lambda path: recording(DataLoader(list(range(10))), path / "run.db"),
    ],
    ids=["nothing", "threads", "recording_gc", "tracing", "recording"],
)
def test_ctrl_c_in_a_collection_is_heard(observed, tmp_path, monkeypatch):
    """Whatever we note of it meanwhile."""
    with observed(tmp_path):
        assert is_heard(monkeypatch)


@pytest.fixture(params=[True, False])
def is_on(request):
    """Whether the collector is, before the test; afterwards it is as it was."""
    was_on = gc.isenabled()
    (gc.enable if request.param else gc.disable)()
    yield request.param
    (gc.enable if was_on else gc.disable)()


@pytest.mark.parametrize("ends_first", [True, False])
def test_collector_is_afterwards_as_it_was(is_on, ends_first):
    """After an error, after a block within a block, and after those of several threads, whichever
    begins and ends first; a program that switched it off keeps it off."""
    inside, may_end = threading.Event(), threading.Event()

    def import_until():
        with suppress(ImportError), collected_later():
            inside.set()
            may_end.wait()
            raise ImportError("no such module")

    importing = in_thread(import_until)
    inside.wait()
    with collected_later():
        with collected_later():
            assert not gc.isenabled()
        if ends_first:
            may_end.set()
            result_of(importing)
    may_end.set()
    result_of(importing)
    assert gc.isenabled() is is_on


def test_runs_are_noted_once():
    """Whoever has them noted; with what Python says of them."""
    collections = Collections()
    with collected_later():
        for _ in range(2):
            collections.begin()
        for generation in (0, 1, 2, 1):
            gc.collect(generation)
        collections.end()
        gc.collect()
    assert [each.info["generation"] for each in collections.taken()] == [0, 1, 2, 1]
    assert collections.taken() == []


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


@pytest.fixture
def heard():
    """The signals that the program's handlers heard."""
    heard = []
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        signal.signal(number, lambda number, frame: heard.append(number))
    yield heard
    for number, handler in before.items():
        signal.signal(number, handler)


def handlers():
    return [signal.getsignal(number) for number in signal.valid_signals()]


def test_handlers_run_after_the_block(heard):
    """Each once, however often its signal came, and after the outer one of two blocks; they are in
    their places again, and later blocks defer as the first one did."""
    before = handlers()
    for _ in range(2):
        with handlers_deferred():
            with handlers_deferred():
                for number in (*SIGNALS, *SIGNALS):
                    os.kill(os.getpid(), number)
            assert heard == []
        assert sorted(heard) == sorted(SIGNALS)
        assert handlers() == before
        heard.clear()


IN_THREADS = partial(DataLoader, Indices(8), num_workers=2, isolation="thread")
IN_PROCESSES = partial(DataLoader, Indices(8), num_workers=2, isolation="process")
IN_A_PIPELINE = partial(PipelineDataset, PipelineBuilder().add_source(range(8)).add_sink(1))


@pytest.mark.parametrize("make", [IN_THREADS, IN_A_PIPELINE])
def test_what_a_handler_raises_as_a_thread_starts_arrives_as_itself(make, monkeypatch):
    """Python takes an exception there for its own. A pass that has not begun has no report."""
    starts = [n for n in ("_start_new_thread", "_start_joinable_thread") if hasattr(threading, n)]
    start = getattr(threading, starts[-1])

    def signalled(*args, **options):
        started = start(*args, **options)
        signal.raise_signal(signal.SIGALRM)
        return started

    def too_late(*_):
        raise TimeoutError("too late")

    with handled(too_late, signal.SIGALRM), monkeypatch.context() as patch:
        patch.setattr(threading, starts[-1], signalled)
        with pytest.raises(TimeoutError, match="too late"):
            next(iter(make()))
    assert len(list(make())) == 8


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_child_that_is_forked_meanwhile_collects_as_before(is_on):
    """Nobody in it would switch the collector on: before, in and after a block of its own."""

    def collects():
        found = [gc.isenabled()]
        with collected_later():
            found.append(gc.isenabled())
        return [*found, gc.isenabled()]

    with collected_later():
        assert found_in_fork(collects) == [is_on, False, is_on]


def test_ctrl_c_is_raised_after_the_block():
    """By Python's own handler, and what the block was to do is done, or its error is told, too."""
    before, error = handlers(), ZeroDivisionError()

    def interrupted():
        with handlers_deferred():
            signal.raise_signal(signal.SIGINT)
            raise error

    with pytest.raises(KeyboardInterrupt, match=r"^$") as info:
        interrupted()
    assert info.value.__context__ is error
    assert handlers() == before


def test_handler_that_raises_while_they_are_put_back_loses_none(heard, monkeypatch):
    """They are in their places, and called."""
    before, put_back, places = handlers(), _signal.signal, [SIGNALS[-1]]

    def interrupted(number, handler):
        if number in places:
            places.clear()
            raise KeyboardInterrupt("while putting back")
        return put_back(number, handler)

    with pytest.raises(KeyboardInterrupt, match="while putting back"), handlers_deferred():
        monkeypatch.setattr(_signal, "signal", interrupted)
    monkeypatch.undo()
    assert handlers() == before
    for number in SIGNALS:
        os.kill(os.getpid(), number)
    assert heard == list(SIGNALS)


def test_process_that_is_forked_in_the_block_has_the_handlers(heard):
    """At once, and the parent has them afterwards."""
    before = handlers()

    def child():
        is_same = handlers() == before
        os.kill(os.getpid(), signal.SIGUSR1)
        return is_same, list(map(int, heard))

    with handlers_deferred():
        assert found_in_fork(child) == (True, [signal.SIGUSR1])
    assert handlers() == before


@pytest.mark.parametrize("make", [IN_THREADS, IN_PROCESSES, IN_A_PIPELINE])
def test_no_callback_of_a_weak_set_runs_while_a_loader_is_used(make):
    """It is written in Python, and Ctrl-C would come there now and then, be printed, and lost."""
    callbacks = []

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_qualname == "WeakSet.__init__.<locals>._remove":
            callbacks.append(frame.f_back)

    list(make())  # what is made once
    sys.setprofile(note)
    try:
        for _ in range(2):
            list(make())
    finally:
        sys.setprofile(None)
    assert callbacks == []
