"""Modules that a file of tests imports when its first test runs, and not while tests are collected.

Each process of a run collects all tests. Lightning and what it brings would take 3 s in each, and
double what every fork of it costs from then on.
"""

from __future__ import annotations

import importlib.util
import os
import sys

import pytest

LIGHTNINGS_WARNINGS = [
    pytest.mark.filterwarnings(f"ignore:{each}")
    for each in (
        *(".*does not have many workers", ".*is smaller than the logging interval"),
        *(".*LeafSpec", "The `srun` command is available"),
        *("Your `IterableDataset` has `__len__` defined", "You defined a `validation_step`"),
        *(".*but not on `on_train_epoch_end`", "Checkpoint directory"),
        "Be aware that when using `ckpt_path`, callbacks",
        "You're resuming from a checkpoint that ended before",
        *("This DataLoader will create", ".*multi-threaded, use of fork:DeprecationWarning"),
    )
]
"""Its own, and those of a machine with few cores: ``pytestmark`` of the files that train by it."""


class Later:
    """A module, imported when something in it is asked for."""

    def __init__(self, name):
        self._name = name

    def __getattr__(self, name):
        if "PYTEST_CURRENT_TEST" not in os.environ:
            raise AttributeError(name)  # no test asks: pytest looks for fixtures
        importlib.import_module(self._name)
        return getattr(sys.modules[self._name], name)


def later(name, *more):
    """Return a module; without its package the file that asks for it is skipped, as by
    ``importorskip``. More names: the modules of each."""
    if importlib.util.find_spec(name.partition(".")[0]) is None:
        pytest.skip(f"could not import {name!r}", allow_module_level=True)
    return Later(name) if not more else (Later(name), *map(Later, more))
