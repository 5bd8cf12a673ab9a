"""Datasets that keep states, for loaders whose workers are threads or in a process of their own."""

from __future__ import annotations

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info


def share_of_worker(length):
    """The numbers that belong to this worker."""
    info = get_worker_info()
    first, step = (0, 1) if info is None else (info.id, info.num_workers)
    return range(first, length, step)


class Asked:
    """Counts how often it was asked for its state, with all its copies in this process."""

    num_asked = 0

    def state_dict(self):
        Asked.num_asked += 1
        return self.state()

    def load_state_dict(self, state):
        self.load(state)


class Live(Asked, IterableDataset):
    """Its state is a container that it goes on using; and it carries on where it was in the epoch
    before, unless that was finished.
    """

    def __init__(self, length=24):
        self.length = length
        self.place = {"given": []}

    def __iter__(self):
        self.place = {"given": [*self.place["given"]]}  # each worker's own
        for item in share_of_worker(self.length)[len(self.place["given"]) :]:
            self.place["given"].append(item)
            yield torch.tensor([item, int(torch.randint(10**9, ()))])
        self.place["given"].clear()

    def state(self):
        return self.place

    def load(self, state):
        if not set(state["given"]) <= set(range(self.length)):
            raise ValueError("no such items")
        self.place = state


class LiveIterators(IterableDataset):
    """The same of its iterators."""

    def __init__(self, length=24):
        self.length = length

    def __iter__(self):
        return _LiveIterator(share_of_worker(self.length))


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
        return torch.tensor([self.items[self.place[0] - 1], int(torch.randint(10**9, ()))])

    def state(self):
        return self.place

    def load(self, state):
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

    def load(self, state):
        left = state["left"]
        self.next_item, self.left = 0 + state["next_item"], None if left is None else 0 + left


class Shuffled(IterableDataset):
    """A shuffle buffer that draws from torch's generator; what it gives depends on all draws."""

    def __init__(self, length=24):
        self.length = length

    def __iter__(self):
        buffer = []
        for item in share_of_worker(self.length):
            buffer.append(item)
            if len(buffer) == 4:
                yield buffer.pop(int(torch.randint(len(buffer), ())))
        while buffer:
            yield buffer.pop(int(torch.randint(len(buffer), ())))


class ForSomebodyElse(IterableDataset):
    """Its methods are not meant for a loader, as those of litdata's streams."""

    def __init__(self, length=12):
        self.length = length

    def __iter__(self):
        return iter(share_of_worker(self.length))

    def state_dict(self, num_samples_yielded, num_workers, batch_size):
        raise AssertionError("nobody may call it")

    def load_state_dict(self, state):
        raise AssertionError("nobody may call it")


class NotReady(ForSomebodyElse):
    """Cannot tell its state."""

    def state_dict(self):
        raise LookupError("no cursor yet")


class Uncopyable(ForSomebodyElse):
    """Its state cannot be sent from a process."""

    def state_dict(self):
        return {"cursor": lambda: 0}


class OnlyFor(Dataset):
    """Map-style, with methods that are not for loaders."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return index

    def state_dict(self, destination):
        raise AssertionError("nobody may call it")

    def load_state_dict(self, state):
        raise AssertionError("nobody may call it")


class Numbers(Dataset):
    """Samples show what they drew."""

    def __init__(self, length=24):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.tensor([index, int(torch.randint(10**9, ()))])


class Bulk(Numbers):
    """Makes its samples a batch at a time."""

    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Walk(IterableDataset):
    """Goes on where it was, whoever iterates; tells nobody where that is."""

    def __init__(self, length=12):
        self.length = length
        self.at = 0

    def __iter__(self):
        items = share_of_worker(self.length)
        while self.at < len(items):
            self.at += 1
            yield items[self.at - 1]


class WalkWithState(Walk):
    """The same, with a state."""

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Steps:
    """An iterator with a state."""

    def __init__(self, items):
        self.items, self.place = items, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.place == len(self.items):
            raise StopIteration
        self.place += 1
        return self.items[self.place - 1]

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


class SteppedOver(IterableDataset):
    """Its iterators keep a state, which ends with them."""

    def __init__(self, length=12):
        self.length = length

    def __iter__(self):
        return Steps(share_of_worker(self.length))


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
