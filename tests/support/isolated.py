"""Loaders whose workers are processes, what they return, and what they may not leave."""

from __future__ import annotations

import gc
import multiprocessing
import os

import pytest

from spdl_torch import DataLoader
from spdl_torch.loader.backends.processes.process import reap
from support.gates import shared_memory_of, until
from support.loaders import PATIENCE_SECONDS, assert_threads_end, frozen as bits


def children():
    """The worker processes that live now."""
    return [each for each in multiprocessing.active_children() if each.name == "spdl-loader"]


@pytest.fixture(autouse=True)
def nothing_left():
    """No thread, no child, no mapping of a slab, no name in /dev/shm outlives a test."""
    named = shared_memory_of(os.getpid())
    SLABS_OF_OTHERS.update(mapped_slabs())
    yield
    assert_threads_end()
    until(lambda: not children())
    assert not num_mapped_slabs()
    assert not shared_memory_of(os.getpid()) - named


def release_what_has_ended():
    """Release what is left of processes that have ended, as a loader does that begins."""
    until(lambda: not children())
    reap(PATIENCE_SECONDS)


SLABS_OF_OTHERS: set[str] = set()
"""The slabs of batches that an earlier test keeps in a variable: a page of the docs, say."""


def num_mapped_slabs():
    """Of this process and test (Linux; elsewhere there is nothing to count)."""
    gc.collect()
    return sum(slab not in SLABS_OF_OTHERS for slab in mapped_slabs())


def mapped_slabs():
    """The inode of every mapping of a slab."""
    if not os.path.exists("/proc/self/maps"):
        return []
    with open("/proc/self/maps", encoding="utf-8") as file:
        return [line.split()[4] for line in file if "spdl-torch-slab" in line]


def isolated(dataset, *args, num_workers=2, **options):
    """A loader whose workers are processes, which are forked where torch's are."""
    return DataLoader(dataset, *args, num_workers=num_workers, isolation="process", **options)


def served(dataset, *args, **options):
    """The same; everything is pickled on its way to the child."""
    return isolated(dataset, *args, multiprocessing_context="forkserver", **options)


def epochs_of(loader, count=2):
    """Some epochs, as comparable values."""
    return [[bits(batch) for batch in loader] for _ in range(count)]
