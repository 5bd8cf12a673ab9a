"""Every combination of the loader's options, by table: batches, errors and refusals are torch's.

The oracles:

* ``num_workers=0``: torch's DataLoader itself;
* ``num_workers`` 1 and 4: ``ModelLoader``, torch's worker protocol played in one thread, for every
  combination; torch's real worker processes and, where it is installed, torchdata's
  StatefulDataLoader;
* what torch refuses, it refuses in person.

Ours are threads, and processes where torch's real processes are the oracle.

The short form has the rows that cover all triples of values: whatever goes wrong when three options
meet, or an option, another one and a situation, is seen. Processes are started for rows that cover
all pairs, by torch's loader and torchdata's in turn. The long form has the whole table.
"""

import itertools
import warnings
from typing import Any, NamedTuple

import pytest
from _covering import covering
from _datasets import BulkData, MapData, RecordingSampler, StreamData, item_of
from _inside import iterator_of
from _loader_helpers import DataLoader, ModelLoader, ThreadLoader, frozen
from torch.utils.data import (
    DataLoader as TorchLoader,
    IterableDataset,
    default_collate,
    default_convert,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:Length of IterableDataset:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]

KINDS = ("map", "iterable")
ORDERS = ("sampler", "batch_sampler", "none")
BATCH_SIZES = (1, 3, None)  # 1 is torch's default, the only one that a batch_sampler goes with
DROP_LAST = (False, True)
IN_ORDER = (True, False)
WORKERS = (0, 1, 4)
PERSISTENT = (False, True)
SITUATIONS = ("works", "uneven", "empty", "raises", "dies", "collate raises")

EPOCHS = 2
BAD = 4
"""The sample that raises, or that the collate function does not like."""


class Combination(NamedTuple):
    """One row of the table."""

    kind: str
    order: str
    batch_size: int | None
    drop_last: bool
    in_order: bool
    num_workers: int
    persistent: bool

    def __str__(self):
        flags = [name for name in ("drop_last", "in_order", "persistent") if getattr(self, name)]
        size = f"batch_size={self.batch_size}"
        return "-".join([self.kind, self.order, size, f"workers={self.num_workers}", *flags])

    def in_torchs_order(self):
        """The same row for a loader whose batches come one after the other."""
        return self._replace(in_order=True)

    def build(self, loader_class, situation):
        """The loader of a class; raises what its constructor raises."""
        collate_fn = None
        if situation == "collate raises":
            collate_fn = picky_convert if self.batch_size is None else picky_collate
        options: dict[str, Any] = {
            "batch_size": self.batch_size,
            "drop_last": self.drop_last,
            "in_order": self.in_order,
            "num_workers": self.num_workers,
            "persistent_workers": self.persistent,
            "collate_fn": collate_fn,
        }
        indices = [] if situation == "empty" else ORDER[: LENGTHS[situation]]
        if self.order == "sampler":
            options["sampler"] = RecordingSampler(indices)
        elif self.order == "batch_sampler":
            lists = [indices[:4], indices[4:5], indices[5:7], indices[7:]]
            options["batch_sampler"] = RecordingSampler([some for some in lists if some])
        return loader_class(dataset_of(self.kind, situation), **options)

    def is_accepted(self):
        """What torch's documentation says can go together."""
        if self.persistent and not self.num_workers:
            return False
        if self.kind == "iterable" and self.order != "none":
            return False
        if self.order == "batch_sampler":
            return self.batch_size == 1 and not self.drop_last
        return not (self.batch_size is None and self.drop_last)


LENGTHS = dict.fromkeys(SITUATIONS, 12) | {"uneven": 11, "empty": 0}
ORDER = [7, 2, 9, 0, 4, 11, 1, 5, 10, 3, 8, 6]

COMBINATIONS = [
    Combination(*row)
    for row in itertools.product(
        KINDS, ORDERS, BATCH_SIZES, DROP_LAST, IN_ORDER, WORKERS, PERSISTENT
    )
]
ACCEPTED = [combination for combination in COMBINATIONS if combination.is_accepted()]
REFUSED = [combination for combination in COMBINATIONS if not combination.is_accepted()]
IN_PROCESSES = [c for c in ACCEPTED if c.num_workers and c.in_order]


class MortalStream(IterableDataset):
    """A generator: its error is its end, as Python has it."""

    def __len__(self):
        return 12

    def __iter__(self):
        for index in range(len(self)):
            if index == BAD:
                raise OSError(f"bad {index}")
            yield item_of(index)


def dataset_of(kind, situation):
    length = LENGTHS[situation]
    bad = {BAD: KeyError} if situation in ("raises", "dies") else {}
    if situation == "dies":
        return MortalStream() if kind == "iterable" else BulkData(length, bad)
    return (StreamData if kind == "iterable" else MapData)(length, bad)


def picky_collate(samples):
    if any(sample["y"] == BAD for sample in samples):
        raise ZeroDivisionError("picky")
    return default_collate(samples)


def picky_convert(sample):
    if sample["y"] == BAD:
        raise ZeroDivisionError("picky")
    return default_convert(sample)


def epochs_of(loader):
    """Batches and errors, type and text, of every epoch."""
    return [list(events_of(iter(loader))) for _ in range(EPOCHS)]


def events_of(batches):
    for _ in range(100):
        try:
            yield frozen(next(batches))
        except StopIteration:
            return
        except Exception as error:
            yield type(error), str(error)
    raise AssertionError("the epoch does not end")


def comparable(epochs, combination):
    """With several workers in_order=False promises which batches come, not when."""
    if combination.in_order or combination.num_workers < 2:
        return epochs
    return [sorted(epoch, key=repr) for epoch in epochs]


def accepted():
    """The whole table; short of it, rows that cover all triples of values."""
    rows = [(*combination, situation) for combination in ACCEPTED for situation in SITUATIONS]
    short = covering(rows, 3)
    for row in rows:
        combination = Combination(*row[:-1])
        marks = [] if row in short else [pytest.mark.long]
        yield pytest.param(combination, row[-1], id=f"{combination}-{row[-1]}", marks=marks)


@pytest.mark.parametrize(("combination", "situation"), list(accepted()))
def test_epochs_equal_torchs(combination, situation):
    """The batches and errors of two epochs, in torch's order; out of order the same ones."""
    oracle = combination.in_torchs_order().build(ModelLoader, situation)
    ours = combination.build(ThreadLoader, situation)
    found, expected = (comparable(epochs_of(loader), combination) for loader in (ours, oracle))
    assert found == expected, f"{outline(found)}, expected {outline(expected)}"


def outline(epochs):
    """The errors, and of the batches what tells them apart, for a message that can be read."""
    return [[e if e[0] != "dict" else dict(e[1:])["y"] for e in each] for each in epochs]


@pytest.mark.parametrize("combination", REFUSED, ids=str)
def test_refusal_equals_torchs(combination):
    """The same exception with the same words, for every situation."""
    for situation in SITUATIONS:
        theirs = refusal(combination, TorchLoader, situation)
        assert theirs is not None
        assert refusal(combination, DataLoader, situation) == theirs


def refusal(combination, loader_class, situation):
    """Type and text of what the constructor raises; None if it accepts."""
    try:
        combination.build(loader_class, situation)
    except Exception as error:
        return type(error), str(error)
    return None


def torchdata_loader(*args, **kwargs):
    """torchdata's StatefulDataLoader, without the warning on what it asks of torch."""
    module = pytest.importorskip("torchdata.stateful_dataloader", reason="extra: bench")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
        return module.StatefulDataLoader(*args, **kwargs)


def in_processes():
    """The whole table with both; short of it, pairs of values with one of the two."""
    oracles = itertools.cycle((TorchLoader, torchdata_loader))
    rows = [(*combination, situation) for combination in IN_PROCESSES for situation in SITUATIONS]
    short = {(row, next(oracles)) for row in covering(rows, 2)}
    for row, oracle in itertools.product(rows, (TorchLoader, torchdata_loader)):
        combination = Combination(*row[:-1])
        name = f"{oracle.__name__}-{combination}-{row[-1]}"
        marks = [] if (row, oracle) in short else [pytest.mark.long]
        yield pytest.param(oracle, combination, row[-1], id=name, marks=marks)


@pytest.mark.parametrize(("oracle", "combination", "situation"), list(in_processes()))
def test_epochs_equal_those_of_worker_processes(oracle, combination, situation):
    """The model is not invented: forked workers tell the same story, errors with more text."""
    ours_class = DataLoader if oracle is TorchLoader else ThreadLoader
    ours = epochs_of(combination.build(ours_class, situation))
    loader = combination.build(oracle, situation)
    theirs = epochs_of(loader)
    if combination.persistent:
        # What an error refers to is left to the garbage collector, which may close the workers'
        # queues before it ends the workers: each then notices 5 s later.
        iterator_of(loader)._shutdown_workers()
    assert [len(epoch) for epoch in ours] == [len(epoch) for epoch in theirs]
    for our_epoch, their_epoch in zip(ours, theirs, strict=True):
        for our_event, their_event in zip(our_epoch, their_epoch, strict=True):
            if isinstance(our_event[0], type):
                assert our_event[0] is their_event[0]
                assert our_event[1] in their_event[1]
            else:
                assert our_event == their_event
