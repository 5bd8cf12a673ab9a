"""Subclasses of the loader as training repositories write them: batches are those of torch's."""

import queue
import threading
from functools import partial

import pytest
import torch
from _datasets import Made
from _loader_helpers import ModelLoader, swap_batch_sampler

import spdl_torch

VECTORS = Made(lambda index: (index, torch.full((3,), float(index))), 13)


class Forever:
    """A sampler that begins again where the one inside it ends."""

    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        while True:
            yield from iter(self.sampler)


def past_the_class(loader):
    """Give it a batch sampler without end, which the class refuses after ``__init__``."""
    object.__setattr__(loader, "batch_sampler", Forever(loader.batch_sampler))


def by_private_flag(loader):
    """The same: the loader is made to think that it is still being initialised."""
    swap_batch_sampler(loader, Forever(loader.batch_sampler))


def one_iterator(set_sampler, base):
    """Workers live for all epochs, of which one iterator has the batches."""

    class Loader(base):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            set_sampler(self)
            self.iterator = super().__iter__()

        def __len__(self):
            return len(self.batch_sampler.sampler)

        def __iter__(self):
            for _ in range(len(self)):
                yield next(self.iterator)

        def reset(self):
            self.iterator = self._get_iterator()

    return Loader


class Background(threading.Thread):
    """An iterator whose items another thread takes from the one inside it."""

    def __init__(self, items):
        super().__init__(daemon=True)
        self.items, self.taken = items, queue.Queue(2)
        self.start()

    def run(self):
        for item in self.items:
            self.taken.put(item)
        self.taken.put(None)

    def __iter__(self):
        return iter(self.taken.get, None)


def in_background(base):
    """Another thread iterates, two batches ahead of the loop."""

    class Loader(base):
        def __iter__(self):
            return iter(Background(super().__iter__()))

        def reset(self):
            """Do nothing: each epoch has an iterator of its own."""

    return Loader


WORKERS = {"num_workers": 2, "shuffle": True}
OPTIONS = [{}, WORKERS, WORKERS | {"persistent_workers": True}]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(
    "subclass",
    [partial(one_iterator, past_the_class), partial(one_iterator, by_private_flag), in_background],
    ids=["past the class", "by private flag", "in background"],
)
def test_subclass_has_the_batches_of_torchs(subclass, options):
    """In three epochs, the last one after a reset."""
    epochs = []
    for base in (ModelLoader, spdl_torch.DataLoader):
        torch.manual_seed(0)
        loader = subclass(base)(VECTORS, 4, **options)
        epochs.append([])
        for number in range(3):
            if number == 2:
                loader.reset()
            epochs[-1].append([(indices.tolist(), rows.tolist()) for indices, rows in loader])
    assert epochs[0] == epochs[1]
    assert [len(each) for each in epochs[1]] == [4, 4, 4]
