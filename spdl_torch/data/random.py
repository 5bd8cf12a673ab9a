"""torch's random functions on worker threads: a stream for each sample, the trainer's untouched.

Threads share torch's global generator. If worker threads drew from it, augmentations would depend
on which thread came first, and so would the next epoch's shuffle, whose seed comes from the same
generator. So user code runs under a ``TorchFunctionMode`` (which is per thread) that supplies
``generator=`` to torch's random functions: the thread's own, seeded anew for every sample from the
epoch's base seed and the sample's place in the epoch. The results are then the same for any
number of threads. A batch that the dataset makes in one call (``__getitems__``) has one stream;
an iterable dataset has one for each worker, as in torch.

Not covered: draws that never pass through Python (dropout layers inside a dataset), Python's
``random`` and ``numpy.random``, which go on drawing from the process's generators.
"""

from __future__ import annotations

import random
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = ["SampleRandom", "process_generators_kept", "sample_seed"]

_FACTORIES = (
    "rand",
    "randn",
    "randint",
    "randperm",
    "normal",
    "bernoulli",
    "multinomial",
    "poisson",
)
_LIKE = ("rand_like", "randn_like", "randint_like")
_IN_PLACE = (
    "bernoulli_",
    "cauchy_",
    "exponential_",
    "geometric_",
    "log_normal_",
    "normal_",
    "random_",
    "uniform_",
)

_TAKES_GENERATOR: frozenset[Callable[..., Any]] = frozenset(
    function
    for holder, names in (
        (torch, _FACTORIES + _LIKE),
        (torch.Tensor, (*_IN_PLACE, "bernoulli", "multinomial")),
    )
    for name in names
    if (function := getattr(holder, name, None)) is not None
)


class SampleRandom(TorchFunctionMode):
    """Supplies one thread's generator to torch's random functions while it is entered.

    Costs 1 to 2 µs for each torch call made under it. Calls that name a generator, or that draw
    on an accelerator, are left alone.
    """

    def __init__(self, worker_seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator()
        self._generator.manual_seed(worker_seed)
        self._epoch_seed = self._batch = 0
        self._pending: int | None = None

    def begin(self, epoch_seed: int, batch: int) -> None:
        """The samples of a batch follow; until ``positions`` is used they share one stream."""
        self._epoch_seed, self._batch, self._pending = epoch_seed, batch, 0

    def at(self, position: int) -> None:
        """The sample at ``position`` of the batch follows: its stream starts at its first draw,
        so that samples which draw nothing cost nothing."""
        self._pending = position

    def positions(self, indices: Iterable[Any]) -> Iterator[Any]:
        """``indices``, each with its own stream from the moment it is taken."""
        for self._pending, index in enumerate(indices):
            yield index

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _TAKES_GENERATOR and _draws_on_cpu(args, kwargs or {}):
            if self._pending is not None:
                seed = sample_seed(self._epoch_seed, self._batch, self._pending)
                self._generator.manual_seed(seed)
                self._pending = None
            return func(*args, **{**(kwargs or {}), "generator": self._generator})
        return func(*args, **(kwargs or {}))


def _draws_on_cpu(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if kwargs.get("generator") is not None:
        return False
    device = kwargs.get("device")
    if device is not None:
        return torch.device(device).type == "cpu"
    return all(a.device.type == "cpu" for a in args if isinstance(a, torch.Tensor))


_MASK = (1 << 64) - 1


def sample_seed(epoch_seed: int, batch: int, position: int) -> int:
    """The seed of the sample at ``position`` of batch number ``batch`` of an epoch.

    Three rounds of splitmix64's finaliser (https://prng.di.unimi.it/splitmix64.c), so that
    neighbours in any of the three share nothing; 64 bits.
    """
    state = _mix(epoch_seed & _MASK)
    state = _mix(state ^ (batch & _MASK))
    return _mix(state ^ (position & _MASK))


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


@contextmanager
def process_generators_kept() -> Iterator[None]:
    """Put torch's, Python's and numpy's global generators back as they were.

    Around ``worker_init_fn``, which in a worker process may seed all three (Lightning's does):
    on a thread that would seed the trainer.
    """
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])
