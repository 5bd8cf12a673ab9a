"""The collector's runs, noted while any signal that comes meanwhile is heard."""

import _thread
import gc
import itertools
import signal
import sys
from contextlib import contextmanager, nullcontext
from functools import partial

import pytest

from spdl_torch import DataLoader
from spdl_torch.machine.garbage import Collections
from spdl_torch.machine.probes import start_probing, stop_probing
from spdl_torch.observe import recording, recording_gc, tracing


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


@contextmanager
def ctrl_c_in_the_next_collection():
    callback = partial(getattr, SignalAtStart())
    gc.callbacks.insert(0, callback)
    try:
        yield
    finally:
        gc.callbacks.remove(callback)


def is_heard(monkeypatch):
    """Whether Ctrl-C in a collection is raised, and not swallowed."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    try:
        with ctrl_c_in_the_next_collection():
            gc.collect()
        for _ in range(100):
            pass
    except KeyboardInterrupt:
        return True
    return False


@contextmanager
def probing():
    user = SignalAtStart()
    start_probing(user)
    try:
        yield
    finally:
        stop_probing(user)


@contextmanager
def loading():
    iterator = iter(DataLoader(list(range(100)), num_workers=2, isolation="thread"))
    next(iterator)
    yield


@pytest.mark.parametrize(
    "observed",
    [
        lambda _: nullcontext(),
        lambda _: probing(),
        lambda _: loading(),
        lambda _: recording_gc(lambda _: None),
        lambda path: tracing(path / "trace.json"),
        lambda path: recording(DataLoader(list(range(10))), path / "run.db"),
    ],
    ids=["nothing", "probe", "threads", "recording_gc", "tracing", "recording"],
)
def test_ctrl_c_in_a_collection_is_heard(observed, tmp_path, monkeypatch):
    """Whatever we note of it meanwhile."""
    with observed(tmp_path):
        assert is_heard(monkeypatch)


def test_runs_are_noted_once_with_what_python_says_of_them():
    """As a callback of Python's is told, and as long as they last."""
    told = []
    note = lambda phase, info: told.append((phase, dict(info)))  # noqa: E731
    collections = Collections()
    gc.disable()
    gc.callbacks.append(note)
    collections.begin()
    collections.begin()
    try:
        for generation in (0, 1, 2, 1):
            gc.collect(generation)
    finally:
        collections.end()
        gc.callbacks.remove(note)
        gc.enable()
    found = collections.taken()
    assert [each.info for each in found] == [info for phase, info in told if phase == "stop"]
    assert all(each.began_ns <= each.ended_ns for each in found)
    assert [a.ended_ns <= b.began_ns for a, b in itertools.pairwise(found)] == [True] * 3
    assert collections.taken() == []
    gc.collect()
    assert collections.taken() == []
    assert not collections.is_noting


@pytest.mark.parametrize("lost", ["_began", "_ended", "_infos"])
def test_runs_after_a_loss_are_whole(lost):
    """Ctrl-C may come in the middle of taking one."""
    collections = Collections()
    gc.disable()
    try:
        collections.begin()
        gc.collect(0)
        getattr(collections, lost).popleft()
        for _ in range(3):
            collections.taken()
        gc.collect(1)
        (found,) = [each for _ in range(3) for each in collections.taken()]
    finally:
        collections.end()
        gc.enable()
    assert found.info["generation"] == 1
    assert found.began_ns <= found.ended_ns
