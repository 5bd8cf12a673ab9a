"""A random stream for each sample, on whichever thread it is made; the trainer's untouched.

Threads share the process's generators. If the dataset drew from them, augmentations would depend
on which thread came first, and so would the next epoch's shuffle, whose seed comes from torch's.
So a thread that runs user code has generators of its own (torch's, Python's and numpy's), seeded
anew for every sample from the epoch's base seed and the sample's position in the epoch. The
results are the same for any number of threads, 0 included.

torch's random functions take a ``generator=``, which a ``TorchFunctionMode`` (it is per thread)
supplies. How the others are led to the thread's own: ``generators.py``.

Not covered: draws inside C++ that take no generator (dropout) and draws on an accelerator.
"""

from __future__ import annotations

import enum
import random
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils.data._utils import worker as torch_worker

from .generators import install, of_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from .generators import Generators

__all__ = [
    "Purpose",
    "SampleRandom",
    "StreamKey",
    "epoch_of",
    "epoch_seed",
    "lent",
    "nested_samplers",
    "shard_of",
    "takes_streams",
]

_FUNCTIONS = (
    "_sample_dirichlet",
    "_standard_gamma",
    "bernoulli",
    "binomial",
    "multinomial",
    "normal",
    "poisson",
    "rand",
    "rand_like",
    "randint",
    "randint_like",
    "randn",
    "randn_like",
    "randperm",
    "rrelu",
)
_METHODS = (
    "bernoulli",
    "bernoulli_",
    "cauchy_",
    "exponential_",
    "geometric_",
    "log_normal_",
    "multinomial",
    "normal_",
    "random_",
    "uniform_",
)
# Written in Python, so the mode sees these and not what they call.
_INIT = (
    "kaiming_normal_",
    "kaiming_uniform_",
    "normal_",
    "orthogonal_",
    "sparse_",
    "trunc_normal_",
    "uniform_",
    "xavier_normal_",
    "xavier_uniform_",
)

_TAKES_GENERATOR: frozenset[Callable[..., Any]] = frozenset(
    getattr(holder, name)
    for holder, names in ((torch, _FUNCTIONS), (torch.Tensor, _METHODS), (torch.nn.init, _INIT))
    for name in names
    if hasattr(holder, name)
)

_NUM_WRAPPED = 8  # samplers inside samplers, datasets too; a bound, should one contain itself


class Purpose(enum.IntEnum):
    """What a stream is for: streams of one position differ by it."""

    SAMPLE = 0
    COLLATE = 1
    """Of a batch; the position is its first sample's."""
    ITERABLE = 2
    """``iter(dataset)`` on a worker; the position is the worker's number."""


@dataclass(frozen=True, slots=True)
class StreamKey:
    """The random streams of an epoch: from this and a sample's position follows its seed.

    Positions count the samples of this loader's epoch from 0, in the order of its sampler. With
    a sampler that deals samples out to ranks in turn, rank ``rank`` of ``num_replicas`` has every
    ``num_replicas``-th position of the epoch as a whole, so that seeds do not depend on the number
    of ranks: ``start + position * num_replicas + rank``.
    """

    epoch_seed: int
    start: int = 0
    """Samples of the epoch, on all ranks together, before this loader's first."""
    num_replicas: int = 1
    rank: int = 0

    def seed(self, position: int, purpose: Purpose = Purpose.SAMPLE, generator: int = 0) -> int:
        """The seed of one stream; ``generator`` numbers those that draw side by side.

        63 bits, as all of torch's own: a dataset may put ``torch.initial_seed()`` into a tensor.
        Three rounds of splitmix64's finaliser (https://prng.di.unimi.it/splitmix64.c), so that
        neighbours in any of the three share nothing.
        """
        state = _mix(self.epoch_seed & _MASK)
        state = _mix(state ^ (self.start + position * self.num_replicas + self.rank))
        return _mix(state ^ (purpose + len(Purpose) * generator)) >> 1


def epoch_seed(seed: int, epoch: int) -> int:
    """The base seed of epoch number ``epoch`` of a loader with this ``seed``.

    63 bits, as torch's own base seeds have, so that adding a worker's number stays in 64.
    """
    return _mix(_mix(seed & _MASK) ^ epoch) >> 1


def shard_of(sampler: Any) -> tuple[int, int]:
    """``num_replicas`` and ``rank`` of a sampler that deals samples out to ranks, else (1, 0)."""
    for each in nested_samplers(sampler):
        replicas, rank = getattr(each, "num_replicas", None), getattr(each, "rank", None)
        if isinstance(replicas, int) and isinstance(rank, int) and 0 <= rank < replicas:
            return replicas, rank
    return 1, 0


def epoch_of(sampler: Any) -> int | None:
    """The epoch that a sampler was told by ``set_epoch``; None for one that cannot be told."""
    for each in nested_samplers(sampler):
        epoch = getattr(each, "epoch", None)
        if callable(getattr(each, "set_epoch", None)) and isinstance(epoch, int):
            return epoch
    return None


def nested_samplers(sampler: Any) -> Iterator[Any]:
    """The sampler and those inside it, from the outside in."""
    for _ in range(_NUM_WRAPPED):
        if sampler is None:
            return
        yield sampler
        inner = getattr(sampler, "sampler", None)
        sampler = getattr(sampler, "batch_sampler", None) if inner is None else inner


# Places in a batch, beside those of its samples.
_WORKER, _ITERABLE, _COLLATE = -3, -2, -1

# The generators that draw side by side.
_TORCH, _PYTHON, _NUMPY = range(3)


class SampleRandom(TorchFunctionMode):
    """While it is entered, this thread draws from generators of its own.

    Costs 1 to 2 µs for each torch call made under it. torch calls that name a generator, or that
    draw on an accelerator, are left alone.

    A stream starts at its first draw, so that samples which draw nothing cost nothing. Until a
    batch is begun it is the worker's, seeded as torch seeds its worker processes.
    """

    def __init__(self, base_seed: int, number: int = 0) -> None:
        super().__init__()
        install()
        self._generator = torch.Generator()
        self._python: random.Random | None = None
        self._numpy: np.random.RandomState | None = None
        self._number = number
        self._left: dict[int, tuple[Any, Any, Any]] = {}  # where streams that may go on were left
        self._outer: Generators | None = None
        self._is_cpu_default: bool | None = None
        self._first = 0
        # The place for which each generator was seeded last.
        self._torch_at: int | None = None
        self._python_at: int | None = None
        self._numpy_at: int | None = None
        self.begin_worker(base_seed)

    def __enter__(self) -> Self:
        self._outer, of_thread.streams = of_thread.streams, self
        self._is_cpu_default = None
        TorchFunctionMode.__enter__(self)  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *details: Any) -> None:
        TorchFunctionMode.__exit__(self, *details)  # type: ignore[no-untyped-call]
        self._outer, of_thread.streams = None, self._outer

    def begin_worker(self, base_seed: int) -> None:
        """The worker's own stream follows, from its beginning."""
        self._key, self._place = StreamKey(base_seed), _WORKER
        self._forget()

    def begin_iterable(self, key: StreamKey) -> None:
        """``iter(dataset)`` follows."""
        self._key, self._place = key, _ITERABLE
        self._forget()

    def begin(self, key: StreamKey, first: int) -> None:
        """The samples of a batch follow, the first of them at position ``first`` of the epoch.
        Until another place is named they share one stream."""
        self._key, self._first, self._place = key, first, 0
        self._forget()
        self._left.clear()

    def at(self, place: int) -> None:
        """The sample at ``place`` of the batch follows, with a stream of its own."""
        self._place = place

    @property
    def place(self) -> int:
        """Of the sample, in its batch, that is on."""
        return self._place

    def at_collate(self) -> None:
        """The batch's collate function follows; it has a stream of its own."""
        self._place = _COLLATE

    def aside(self, call: Callable[..., Any], *args: Any) -> Any:
        """``call(*args)``, known to draw nothing, without the cost for each torch call."""
        TorchFunctionMode.__exit__(self, None, None, None)  # type: ignore[no-untyped-call]
        try:
            return call(*args)
        finally:
            TorchFunctionMode.__enter__(self)  # type: ignore[no-untyped-call]

    def positions(self, indices: Iterable[Any]) -> Iterator[Any]:
        """``indices``, each with its own stream from the moment it is taken."""
        for self._place, index in enumerate(indices):
            yield index

    @contextmanager
    def sample_context(self, place: int) -> Iterator[torch.Generator]:
        """The stream of one sample of the batch; entered again, it goes on where it was left.

        Gives torch's generator of it.
        """
        self._place = place
        self._forget()
        self._go_on(place)
        try:
            yield self.generator()
        finally:
            self._leave(place)

    def generator(self) -> torch.Generator:
        """torch's generator of this thread, somewhere in the present stream."""
        if self._torch_at != self._place:
            self._generator.manual_seed(self._seed(_TORCH))
            self._torch_at = self._place
        return self._generator

    def python(self) -> random.Random:
        """Python's, likewise."""
        generator = self._python
        if generator is None:
            generator = self._python = random.Random(0)
        if self._python_at != self._place:
            generator.seed(self._seed(_PYTHON))
            self._python_at = self._place
        return generator

    def numpy(self) -> np.random.RandomState:
        """numpy's, likewise."""
        generator = self._numpy
        if generator is None:
            generator = self._numpy = np.random.RandomState(0)
        if self._numpy_at != self._place:
            if self._place == _WORKER:
                words = cast("Any", torch_worker)._generate_state(
                    self._key.epoch_seed, self._number
                )
                generator.seed(words)
            else:  # one word is quick: 1.3 µs, against 8.7 for two
                generator.seed(self._seed(_NUMPY) & 0xFFFFFFFF)
            self._numpy_at = self._place
        return generator

    def _forget(self) -> None:
        """The generators stand nowhere in the present stream."""
        self._torch_at = self._python_at = self._numpy_at = None

    def _seed(self, generator: int) -> int:
        key, place = self._key, self._place
        if place >= 0:
            return key.seed(self._first + place, Purpose.SAMPLE, generator)
        if place == _COLLATE:
            return key.seed(self._first, Purpose.COLLATE, generator)
        if place == _ITERABLE:
            return key.seed(self._number, Purpose.ITERABLE, generator)
        return key.epoch_seed + self._number

    def _leave(self, place: int) -> None:
        python, numpy = self._python, self._numpy
        self._left[place] = (
            self._generator.get_state() if self._torch_at == place else None,
            python.getstate() if python is not None and self._python_at == place else None,
            numpy.get_state() if numpy is not None and self._numpy_at == place else None,
        )

    def _go_on(self, place: int) -> None:
        for_torch, for_python, for_numpy = self._left.get(place, (None, None, None))
        if for_torch is not None:
            self._generator.set_state(for_torch)
            self._torch_at = place
        if for_python is not None and self._python is not None:
            self._python.setstate(for_python)
            self._python_at = place
        if for_numpy is not None and self._numpy is not None:
            self._numpy.set_state(for_numpy)
            self._numpy_at = place

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _TAKES_GENERATOR and self._draws_on_cpu(args, kwargs or {}):
            return func(*args, **{**(kwargs or {}), "generator": self.generator()})
        return func(*args, **(kwargs or {}))

    def _draws_on_cpu(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if kwargs.get("generator") is not None:
            return False
        device = kwargs.get("device")
        if device is not None:
            return torch.device(device).type == "cpu"
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        if tensors:
            return all(tensor.device.type == "cpu" for tensor in tensors)
        if self._is_cpu_default is None:  # another default is in force on the trainer's thread
            self._is_cpu_default = torch.get_default_device().type == "cpu"
        return self._is_cpu_default


def takes_streams(dataset: Any) -> list[Any]:
    """The datasets, this one and those inside it, that make whole batches and ask for the stream
    of each sample: their class has ``sample_context``, which the loader sets."""
    found = []
    for _ in range(_NUM_WRAPPED):
        if hasattr(type(dataset), "sample_context"):
            found.append(dataset)
        try:
            inner = getattr(dataset, "dataset", None)  # torch's Subset and its kin pass lists on
        except Exception:  # a property of the user's, which torch does not look at
            return found
        if inner is None or inner is dataset:
            return found
        dataset = inner
    return found


@contextmanager
def lent(datasets: list[Any], streams: SampleRandom) -> Iterator[None]:
    """``streams``, for datasets that ask for each sample's and are the trainer's own: they are
    left as they were."""
    before = [vars(dataset).get("sample_context") for dataset in datasets]
    with streams:
        try:
            for dataset in datasets:
                dataset.sample_context = streams.sample_context
            yield
        finally:
            for dataset, context in zip(datasets, before, strict=True):
                dataset.sample_context = context


_MASK = (1 << 64) - 1


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
