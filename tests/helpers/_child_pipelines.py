"""Sources and ops for pipelines in a child process, which imports this module and not the tests."""

from __future__ import annotations

import os
import random
import threading

import numpy as np
import torch
from _isolation_data import Coded

from spdl_torch.pipeline import StatsQueue


class Epochs:
    """``size`` items, distinct from those of all other epochs."""

    def __init__(self, size):
        self.size = size
        self.epoch = -1

    def items(self, epoch):
        return list(range(epoch * 1000, epoch * 1000 + self.size))

    def __iter__(self):
        self.epoch += 1
        return iter(self.items(self.epoch))


class FailsInEpoch(Epochs):
    """Its source raises in the middle of one epoch."""

    def __init__(self, size, bad):
        super().__init__(size)
        self.bad = bad

    def __iter__(self):
        for number, item in enumerate(super().__iter__()):
            if self.epoch == self.bad and number == 1:
                raise Coded(7, "source")
            yield item


def same(item):
    return item


def where(item):
    """Process and thread of the op."""
    return item, os.getpid(), threading.get_ident()


def make_arrays(item):
    """Large and small tensors and arrays: through shared memory and beside it."""
    return {
        "large": torch.full((300, 300), float(item)),
        "array": np.full((300, 300), item),
        "small": np.arange(3),
        "text": str(item),
    }


def fail_on_odd(item):
    if item % 2:
        raise Coded(item, "op")
    return item


def draw(_):
    """From the process's generators."""
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def intra_op_threads(_):
    return torch.get_num_threads()


def environment(name):
    return os.environ.get(name)


def set_variable(name, value):
    """An initializer."""
    os.environ[name] = os.environ.get(name, "") + value


def fail_to_begin():
    raise Coded(3, "initializer")


def pid_or_wait_for_ever(item):
    if item == 1:
        threading.Event().wait()
    return os.getpid()


def kill_on_two(item):
    if item == 2:
        os.kill(os.getpid(), 9)
    return item


class Counter:
    """An iterable that knows how often it was iterated."""

    def __init__(self):
        self.num_passes = 0

    def __iter__(self):
        self.num_passes += 1
        return iter([self.num_passes] * 3)


class NamedQueue(StatsQueue):
    """A queue class that can be sent."""
