"""Datasets and samplers that tests share; worker processes import this, and no tests."""

from __future__ import annotations

import faulthandler
import os
import random
import threading

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from support.forks import end_at_once
from support.gates import PATIENCE_SECONDS


def share_of_worker(length):
    """The numbers that belong to this worker."""
    info = get_worker_info()
    first, step = (0, 1) if info is None else (info.id, info.num_workers)
    return range(first, length, step)


class Sized(Dataset):
    """Map-style, of some length."""

    length = 12

    def __init__(self, length=None):
        self.length = self.length if length is None else length

    def __len__(self):
        return self.length


class Divided(IterableDataset):
    """Iterable: every worker has the items that are its own, torch's way to divide a stream."""

    def __init__(self, length=24):
        self.length = length

    def items(self):
        return share_of_worker(self.length)

    def __iter__(self):
        return map(self.make, self.items())

    def make(self, item):
        return item


class Indices(Sized):
    """Sample i is i; those in ``bad`` cannot be read."""

    bad = ()

    def __init__(self, length=12, bad=()):
        super().__init__(length)
        self.bad = bad

    def __getitem__(self, index):
        if index in self.bad:
            raise ValueError(f"bad {index}")
        return index


class SafeIndices(Indices):
    """The same, declared safe on threads."""

    thread_safe = True


class Stateful:
    """Its state is what it has in these attributes."""

    kept = ()

    def state_dict(self):
        return {name: getattr(self, name) for name in self.kept}

    def load_state_dict(self, state):
        vars(self).update(state)


class Positioned(Stateful):
    """Numbers up to ``length``. It knows where it stands, from one iterator to the next."""

    kept, position = ("position",), 0

    def __iter__(self):
        while self.position < self.length:
            self.position += 1
            yield self.position - 1
        self.position = 0


class IndexStream(Indices, IterableDataset):
    """The same one after another; each worker has its share."""

    def __iter__(self):
        return iter(share_of_worker(self.length))


class Points(Sized):
    """Sample i is a vector of one number, i."""

    def __getitem__(self, index):
        return torch.tensor([float(index)])


class Made(Sized):
    """Samples are what a function makes of their indices."""

    def __init__(self, make, length=12):
        super().__init__(length)
        self.make = make

    def __getitem__(self, index):
        return self.make(index)


class Drawing(Made):
    """Samples are what a function draws."""

    def __getitem__(self, index):
        return self.make()


def drawn(index):
    """A sample that shows what it drew."""
    return torch.tensor([index, int(torch.randint(10**9, ()))])


class Drawn(Sized):
    """Samples show what they drew."""

    length = 24

    def __getitem__(self, index):
        return drawn(index)


class BulkDrawn(Drawn):
    """Makes its samples a batch at a time."""

    def __getitems__(self, indices):
        return [self[index] for index in indices]


class DrawnStream(Divided):
    """The same one after another; each worker has its share."""

    def make(self, item):
        return drawn(item)


class StatefulStream(Stateful, DrawnStream):
    """Keeps its own state, so that no item is made twice: from there the next iterator goes on."""

    kept, next_item = ("next_item",), None

    def __iter__(self):
        items = self.items()
        item = items.start if self.next_item is None else self.next_item
        while item < self.length:
            self.next_item = item + items.step
            yield self.make(item)
            item += items.step
        self.next_item = None


MAP_STYLE = (Drawn, BulkDrawn)
KINDS = (*MAP_STYLE, DrawnStream, StatefulStream)
"""Every kind that a loader tells apart: of a length they hold the same samples."""


class MapData(Sized):
    """Map-style, with dicts; raises the given error type where ``bad`` says so."""

    def __init__(self, length, bad=None):
        super().__init__(length)
        self.bad = bad or {}

    def __getitem__(self, index):
        if index in self.bad:
            raise self.bad[index](f"bad {index}")
        if not 0 <= index < self.length:
            raise IndexError(index)
        return {"x": torch.tensor([index, index + 0.5]), "y": index, "name": f"#{index}"}


class BulkData(MapData):
    """Map-style with torch's ``__getitems__``: the whole batch in one call."""

    def __getitems__(self, indices):
        return [self[index] for index in indices]


class StreamData(MapData, IterableDataset):
    """Iterable; every worker yields everything, or its share if ``split``.

    A bad item raises and the stream goes on behind it, as a file reader's would.
    """

    def __init__(self, length, bad=None, *, split=False):
        super().__init__(length, bad)
        self.split = split

    def __iter__(self):
        share = share_of_worker(self.length) if self.split else range(self.length)
        return map(self.__getitem__, share)


class Images(Sized):
    """Of tensors that are large enough for shared memory; draws from all three generators."""

    length = 24

    def __getitem__(self, index):
        draws = torch.tensor([random.random(), np.random.rand()], dtype=torch.float64)
        image = index + torch.rand(3, 80, 80)
        return {"image": image, "index": index, "name": f"#{index}", "draws": draws}


class Coded(Exception):
    """Has arguments that are not text, and survives pickling."""

    def __init__(self, code, where):
        super().__init__(code, where)
        self.code = code


class Crashing(Sized):
    """Ends its process at sample 5, by a signal or by itself."""

    def __init__(self, how):
        super().__init__(100)
        self.how = how

    def __getitem__(self, index):
        if index == 5:
            if isinstance(self.how, int):
                faulthandler.disable()  # pytest's would print all threads amid the tests' dots
                os.kill(os.getpid(), self.how)
                threading.Event().wait()  # the signal may be another thread's
            end_at_once(3)
        return index


class GatedData(Sized):
    """Sample ``held`` waits until ``gate`` is set; ``entered`` says that a worker is waiting."""

    def __init__(self, length, *, held=0):
        super().__init__(length)
        self.held = held
        self.gate = threading.Event()
        self.entered = threading.Event()

    def __getitem__(self, index):
        if index == self.held:
            self.entered.set()
            assert self.gate.wait(PATIENCE_SECONDS), "nobody opened the gate"
        return index


class Asked:
    """Counts how often it was asked for its state, with all its copies in this process."""

    num_asked = 0

    def state_dict(self):
        Asked.num_asked += 1
        return self.state()


class Live(Asked, DrawnStream):
    """Its state is a container that it goes on using; and it carries on where it was in the epoch
    before, unless that was finished.
    """

    def __init__(self, length=24):
        super().__init__(length)
        self.place = {"given": []}

    def __iter__(self):
        self.place = {"given": [*self.place["given"]]}  # each worker's own
        for item in self.items()[len(self.place["given"]) :]:
            self.place["given"].append(item)
            yield drawn(item)
        self.place["given"].clear()

    def state(self):
        return self.place

    def load_state_dict(self, state):
        if not set(state["given"]) <= set(range(self.length)):
            raise ValueError("no such items")
        self.place = state


class LiveIterators(DrawnStream):
    """The same of its iterators."""

    def __iter__(self):
        return _LiveIterator(self.items())


class _LiveIterator(Asked):
    def __init__(self, items):
        self.items = items
        self.place = [0]

    def __iter__(self):
        return self

    def __next__(self):
        if self.place[0] == len(self.items):
            raise StopIteration
        self.place[0] += 1
        return drawn(self.items[self.place[0] - 1])

    def state(self):
        return self.place

    def load_state_dict(self, state):
        if not 0 <= state[0] <= len(self.items):
            raise ValueError("no such place")
        self.place = state


class Endless(Asked, IterableDataset):
    """Every epoch gives the next four items of each worker, as a stream of new data does."""

    def __init__(self):
        self.next_item, self.left = 0, None

    def __iter__(self):
        info = get_worker_info()
        first = 0 if info is None else 1000 * info.id
        if self.left is None:
            self.left = 4
        while self.left:
            self.left -= 1
            self.next_item += 1
            yield first + self.next_item - 1
        self.left = None

    def state(self):
        return {"next_item": self.next_item, "left": self.left}

    def load_state_dict(self, state):
        left = state["left"]
        self.next_item, self.left = 0 + state["next_item"], None if left is None else 0 + left


class Shuffled(Divided):
    """A shuffle buffer that draws from torch's generator; what it gives depends on all draws."""

    def __iter__(self):
        buffer = []
        for item in self.items():
            buffer.append(item)
            if len(buffer) == 4:
                yield buffer.pop(int(torch.randint(len(buffer), ())))
        while buffer:
            yield buffer.pop(int(torch.randint(len(buffer), ())))


class Walk(Divided):
    """Goes on where it was, whoever iterates; tells nobody where that is."""

    at = 0

    def __iter__(self):
        items = self.items()
        while self.at < len(items):
            self.at += 1
            yield items[self.at - 1]


class WalkWithState(Stateful, Walk):
    """The same, with a state."""

    kept = ("at",)


class Position:
    """A sampler that keeps its position, as a generator that learns of an epoch at its first
    index."""

    def __init__(self, length):
        self.length, self.position, self.begins_at = length, 0, 0

    def __len__(self):
        return self.length

    def __iter__(self):
        self.position, self.begins_at = self.begins_at, 0
        while self.position < self.length:
            self.position += 1
            yield self.position * 5 % self.length

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.begins_at = state["position"]


class Deck:
    """A sampler that begins a new order when its last one is empty."""

    def __init__(self, length):
        self.length, self.own, self.left = length, torch.Generator().manual_seed(3), []

    def __len__(self):
        return self.length

    def __iter__(self):
        if not self.left:
            self.left = torch.randperm(self.length, generator=self.own).tolist()
        while self.left:
            yield self.left.pop()

    def state_dict(self):
        return {"left": self.left, "own": self.own.get_state().tolist()}

    def load_state_dict(self, state):
        self.left = state["left"]
        self.own.set_state(torch.tensor(state["own"], dtype=torch.uint8))


class GoingOn:
    """A source of a pipeline that keeps its generator and its position; after a pass it stands at
    its end until it is iterated again."""

    def __init__(self, length=8):
        self.length, self.generator = length, torch.Generator().manual_seed(3)
        self.order, self.position, self.rests = [], 0, False

    def __iter__(self):
        if self.position == len(self.order) and not self.rests:
            self.order = torch.randperm(self.length, generator=self.generator).tolist()
            self.position = 0
        self.rests = False
        while self.position < len(self.order):
            self.position += 1
            yield self.order[self.position - 1]

    def state_dict(self):
        generator = self.generator.get_state().tolist()
        return {"generator": generator, "order": [*self.order], "position": self.position}

    def load_state_dict(self, state):
        self.generator.set_state(torch.tensor(state["generator"], dtype=torch.uint8))
        self.order, self.position, self.rests = [*state["order"]], state["position"], True


class ShuffledSource:
    """A pipeline's source with another order every epoch."""

    def __init__(self, length):
        self.length, self.epoch = length, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.length

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.epoch)
        return iter(torch.randperm(self.length, generator=generator).tolist())
