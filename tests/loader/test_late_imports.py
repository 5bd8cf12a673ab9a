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
    note = lambda phase, info: begun.append(phase)  # noqa: E731
    gc.callbacks.append(note)
    try:
        kept = make()
    finally:
        gc.callbacks.remove(note)
    assert kept
    return begun.count("start")


def make_objects():
    """As an import does: thousands of objects that live on."""
    return [[] for _ in range(20 * gc.get_threshold()[0])]


def test_objects_of_an_import_count_as_one_collection():
    """Outside of the block they set off one after the other."""

    def make_in_block():
        with collected_later():
            return make_objects()

    assert collections_of(make_objects) >= 10
    assert collections_of(make_in_block) <= 1


@pytest.mark.parametrize("is_on", [True, False])
def test_collector_is_afterwards_as_it_was(is_on):
    """After an error, and after a block within a block, too; a program that switched it off keeps
    it off."""

    def fail_in_block_within_block():
        with collected_later():
            with collected_later():
                assert not gc.isenabled()
            assert not gc.isenabled()
            raise ImportError("no such module")

    (gc.enable if is_on else gc.disable)()
    with pytest.raises(ImportError, match="no such module"):
        fail_in_block_within_block()
    assert gc.isenabled() is is_on


@pytest.mark.parametrize("ends_first", [True, False])
def test_collector_is_on_after_the_blocks_of_several_threads(ends_first):
    """Whichever began first, and whichever ends first."""
    inside, may_end = threading.Event(), threading.Event()

    def import_until():
        with collected_later():
            inside.set()
            may_end.wait()

    thread = threading.Thread(target=import_until)
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


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_child_that_is_forked_meanwhile_collects():
    """Nobody in it would switch the collector on: before, in and after a block of its own."""

    def collects():
        found = [gc.isenabled()]
        with collected_later():
            found.append(gc.isenabled())
        return [*found, gc.isenabled()]

    with collected_later():
        assert found_in_fork(collects) == [True, False, True]
        assert not gc.isenabled()
