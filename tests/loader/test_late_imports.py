"""Imports in the middle of a program do not set off the garbage collector."""

import gc
import os
import threading

import pytest
from _forks import found_in_fork

from spdl_torch.late_imports import collected_later


@pytest.fixture(autouse=True)
def collector():
    """It is on before each test, and afterwards as it was."""
    was_on = gc.isenabled()
    gc.enable()
    yield
    (gc.enable if was_on else gc.disable)()


def collections_of(make):
    """How many collections ``make`` sets off, of any generation."""
    begun = []

    def note(phase, info):
        if phase == "start":
            begun.append(info["generation"])

    gc.callbacks.append(note)
    try:
        kept = make()
    finally:
        gc.callbacks.remove(note)
    assert kept
    return len(begun)


def make_objects():
    """As an import does: thousands of objects that live on."""
    return [[] for _ in range(20 * gc.get_threshold()[0])]


def make_in_block():
    """The same within the block."""
    with collected_later():
        return make_objects()


def test_objects_of_an_import_count_as_one_collection():
    """Outside of the block they set off one after the other."""
    assert collections_of(make_objects) >= 10
    assert collections_of(make_in_block) <= 1


def fail_in_block_within_block():
    """An import that fails, after one that did not."""
    with collected_later():
        with collected_later():
            assert not gc.isenabled()
        assert not gc.isenabled()
        raise ImportError("no such module")


@pytest.mark.parametrize("is_on", [True, False])
def test_collector_is_afterwards_as_it_was(is_on):
    """After an error, and after a block within a block, too; a program that switched it off keeps
    it off."""
    (gc.enable if is_on else gc.disable)()
    with pytest.raises(ImportError, match="no such module"):
        fail_in_block_within_block()
    assert gc.isenabled() is is_on


def test_collector_is_on_after_the_blocks_of_several_threads():
    """Whichever began first, and whichever ends first."""
    for ends_first in (True, False):
        inside, may_end = threading.Event(), threading.Event()
        thread = threading.Thread(target=import_until, args=(inside, may_end))
        thread.start()
        inside.wait()
        with collected_later():
            assert not gc.isenabled()
            if ends_first:
                may_end.set()
                thread.join()
        may_end.set()
        thread.join()
        assert gc.isenabled()


def import_until(inside, may_end):
    """An import that takes its time."""
    with collected_later():
        inside.set()
        may_end.wait()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_child_that_is_forked_meanwhile_collects():
    """Nobody in it would switch the collector on."""
    with collected_later():
        assert found_in_fork(collects) == [True, False, True]
        assert not gc.isenabled()


def collects():
    """Whether it does, before, in and after a block of its own."""
    found = [gc.isenabled()]
    with collected_later():
        found.append(gc.isenabled())
    return [*found, gc.isenabled()]
