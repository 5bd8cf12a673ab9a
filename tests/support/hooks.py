"""User hooks that raise, by kinds of exceptions; worker processes import this, and no tests."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from torch.utils.data import Dataset, IterableDataset, default_collate, get_worker_info


class Plain(Exception):
    """An ordinary exception."""


class Odd(OSError):
    """Its constructor takes other arguments than those that pickle gives it."""

    def __init__(self, code, *, where):
        super().__init__(f"{where} with {code}")
        self.code = code


class Twice(Exception):
    """Its pickle gives another text."""

    def __init__(self, text):
        super().__init__(f"once more: {text}")


class Locked(Exception):
    """It cannot be pickled."""

    def __init__(self, text):
        super().__init__(text)
        self.lock = threading.Lock()
        self.detail = 17


@dataclass(frozen=True)
class Frozen(Exception):
    """Its class refuses every assignment, that of a traceback among them."""

    text: str

    def __str__(self):
        return self.text


class Proxy(Exception):
    """It answers every attribute, as the errors of remote calls do."""

    def __getattr__(self, name):
        return None


def _refuse():
    raise KeyError("not here")


class Unloadable(Exception):
    """It can be pickled, and not loaded."""

    def __reduce__(self):
        return _refuse, ()


class Bare(BaseException):
    """It is no Exception, as a test framework's outcome."""


def _local(text):
    class Local(LookupError):
        """It is not found by its name."""

    return Local(text)


KINDS = {
    "ordinary": Plain,
    "odd": lambda text: Odd(5, where=text),
    "stop": StopIteration,
    "locked": Locked,
    "exit": SystemExit,
    "frozen": Frozen,
    "proxy": Proxy,
    "unloadable": Unloadable,
    "interrupt": KeyboardInterrupt,
    "twice": Twice,
    "generator": GeneratorExit,
    "local": _local,
    "bare": Bare,
}


def error_of(kind, where):
    """Return a new exception of a kind, with a text that says which."""
    return KINDS[kind](f"{kind} in {where}")


class Failing(Dataset):
    """Sample i is i. ``where`` raises ``kinds`` at samples 2, 4, ...: one in every other batch of
    one. It is a method of the dataset's, of its iterators', its batches' or its samples'."""

    def __init__(self, kinds, where):
        self.kinds = kinds
        self.where = where

    def __len__(self):
        return 2 * len(self.kinds) + 3

    def kind_at(self, index):
        number, rest = divmod(index, 2)
        return self.kinds[number - 1] if not rest and 0 < number <= len(self.kinds) else None

    def raise_at(self, index, where):
        kind = self.kind_at(index)
        if where == self.where and kind is not None:
            raise error_of(kind, where)

    def __getitem__(self, index):
        self.raise_at(index, "__getitem__")
        return Part(self, index) if self.where in ("__reduce__", "load") else index

    def collate(self, samples):
        self.raise_at(samples[0], "collate_fn")
        moves = self.where in ("pin_memory", "to")
        return Part(self, samples[0]) if moves else default_collate(samples)


class FailingBatches(Failing):
    """In one call a batch."""

    def __getitems__(self, indices):
        self.raise_at(indices[0], "__getitems__")
        return list(indices)


class FailingStream(IterableDataset, Failing):
    """Its iterators raise and go on; each worker has every second pair of items."""

    def __iter__(self):
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return map(self.item, range(first, len(self), step))

    def item(self, number):
        self.raise_at(number, "__next__")
        return number


class Part:
    """A sample or batch of such a dataset, which pickles, pins or moves itself, is unpickled, or
    raises."""

    def __init__(self, dataset, index):
        self.dataset, self.index = dataset, index

    def __reduce__(self):
        self.dataset.raise_at(self.index, "__reduce__")
        kind = {"pin_memory": Part, "to": Part, "load": Part.load}.get(self.dataset.where)
        return (int, (self.index,)) if kind is None else (kind, (self.dataset, self.index))

    @staticmethod
    def load(dataset, index):
        dataset.raise_at(index, "load")
        return index

    def pin_memory(self):
        self.dataset.raise_at(self.index, "pin_memory")
        return self.index if self.dataset.where == "pin_memory" else self

    def to(self, device, **options):
        self.dataset.raise_at(self.index, "to")
        return self.index


class FailingBegin(IterableDataset):
    """Each ``iter()`` raises another kind, and only then items come."""

    def __init__(self, kinds):
        self.kinds = kinds
        self.num_begun = 0  # of each worker's copy its own

    def __iter__(self):
        self.num_begun += 1
        if self.num_begun <= len(self.kinds):
            raise error_of(self.kinds[self.num_begun - 1], "__iter__")
        return iter(range(4))


class FailingParts(IterableDataset):
    """Its ``iter()`` fails on these workers, in each epoch."""

    def __init__(self, kinds):
        self.kinds = kinds  # by the worker's number

    def __iter__(self):
        kind = self.kinds[get_worker_info().id]
        if kind is not None:
            raise error_of(kind, "__iter__")
        return iter(range(3))


class FailingStates(IterableDataset):
    """Its ``load_state_dict`` raises."""

    def __iter__(self):
        return iter(range(4))

    def state_dict(self):
        return {"next": 0}

    def load_state_dict(self, state):
        raise error_of("stop", "load_state_dict")


class FailingInit:
    """A ``worker_init_fn`` that raises another kind on each worker; None = it does not."""

    def __init__(self, *kinds):
        self.kinds = kinds

    def __call__(self, number):
        if self.kinds[number] is not None:
            raise error_of(self.kinds[number], "worker_init_fn")
