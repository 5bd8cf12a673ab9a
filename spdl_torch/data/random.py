"""torch's random functions on worker threads: a stream for each sample, the trainer's untouched.

Threads share torch's global generator. If worker threads drew from it, augmentations would depend
on which thread came first, and so would the next epoch's shuffle, whose seed comes from the same
generator. So user code runs under a ``TorchFunctionMode`` (which is per thread) that supplies
``generator=`` to torch's random functions: the thread's own, seeded anew for every sample from the
epoch's base seed and the sample's place in the epoch. The results are then the same for any
number of threads. An iterable dataset has one stream for each worker, as in torch.

``torch.manual_seed`` and its kin take no generator; on a worker thread they are led to the
thread's own by replacing their code, once, because users import them by name.

Not covered: draws inside C++ that take no generator (dropout), draws on an accelerator, Python's
``random`` and ``numpy.random``. They go on drawing from the process's generators.
"""

from __future__ import annotations

import random
import threading
import types
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = ["SampleRandom", "process_generators_kept", "sample_seed"]

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

_COLLATE = -1  # the place of a batch's collate function, beside those of its samples

_of_thread = threading.local()
_install_lock = threading.Lock()


class SampleRandom(TorchFunctionMode):
    """Supplies one thread's generator to torch's random functions while it is entered.

    Costs 1 to 2 µs for each torch call made under it. Calls that name a generator, or that draw
    on an accelerator, are left alone.
    """

    def __init__(self, worker_seed: int) -> None:
        super().__init__()
        _install()
        self._generator = torch.Generator()
        self._generator.manual_seed(worker_seed)
        self._epoch_seed = self._batch = 0
        self._pending: int | None = None
        self._left: dict[int, torch.Tensor] = {}  # where streams that may go on were left

    def __enter__(self) -> Self:
        _of_thread.streams = self
        TorchFunctionMode.__enter__(self)  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *details: Any) -> None:
        TorchFunctionMode.__exit__(self, *details)  # type: ignore[no-untyped-call]
        del _of_thread.streams

    def begin(self, epoch_seed: int, batch: int) -> None:
        """The samples of a batch follow; until another place is named they share one stream."""
        self._epoch_seed, self._batch, self._pending = epoch_seed, batch, 0
        self._left.clear()

    def at(self, position: int) -> None:
        """The sample at ``position`` of the batch follows: its stream starts at its first draw,
        so that samples which draw nothing cost nothing."""
        self._pending = position

    def at_collate(self) -> None:
        """The batch's collate function follows; it has a stream of its own."""
        self._pending = _COLLATE

    def positions(self, indices: Iterable[Any]) -> Iterator[Any]:
        """``indices``, each with its own stream from the moment it is taken."""
        for self._pending, index in enumerate(indices):
            yield index

    @contextmanager
    def sample_context(self, position: int) -> Iterator[None]:
        """The stream of one sample of the batch; entered again, it goes on where it was left."""
        if position in self._left:
            self._generator.set_state(self._left[position])
            self._pending = None
        else:
            self.at(position)
        try:
            yield
        finally:
            if self._pending is None:
                self._left[position] = self._generator.get_state()

    def generator(self) -> torch.Generator:
        """The thread's generator, at the start of the present stream or further on in it."""
        if self._pending is not None:
            seed = sample_seed(self._epoch_seed, self._batch, self._pending)
            self._generator.manual_seed(seed)
            self._pending = None
        return self._generator

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _TAKES_GENERATOR and _draws_on_cpu(args, kwargs or {}):
            return func(*args, **{**(kwargs or {}), "generator": self.generator()})
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


def _install() -> None:
    """Lead torch's seeding functions, on threads that have streams, to the thread's generator."""
    with _install_lock:
        if hasattr(torch.random, "_spdl_torch"):
            return
        redirects = {
            "manual_seed": _manual_seed,
            "seed": _seed,
            "initial_seed": _initial_seed,
            "get_rng_state": _get_rng_state,
            "set_rng_state": _set_rng_state,
        }
        originals = {}
        for name in redirects:
            function = getattr(torch.random, name)
            originals[name] = types.FunctionType(
                function.__code__, function.__globals__, name, function.__defaults__
            )
        # The new code runs with torch.random's globals: what it needs is put there.
        torch.random._spdl_torch = _Redirect(_of_thread, originals)  # type: ignore[attr-defined]
        for name, redirect in redirects.items():
            getattr(torch.random, name).__code__ = redirect.__code__


class _Redirect:
    """Finds the generator of this thread, or torch's own function."""

    def __init__(self, of_thread: threading.local, originals: dict[str, Any]) -> None:
        self._of_thread = of_thread
        self.originals = originals

    def generator(self) -> torch.Generator | None:
        """This thread's generator; None on threads that are no workers."""
        streams = getattr(self._of_thread, "streams", None)
        return None if streams is None else streams.generator()


def _manual_seed(seed: Any) -> Any:
    ours = globals()["_spdl_torch"]
    generator = ours.generator()
    if generator is None:
        return ours.originals["manual_seed"](seed)
    return generator.manual_seed(int(seed))


def _seed() -> Any:
    ours = globals()["_spdl_torch"]
    generator = ours.generator()
    return ours.originals["seed"]() if generator is None else generator.seed()


def _initial_seed() -> Any:
    ours = globals()["_spdl_torch"]
    generator = ours.generator()
    return ours.originals["initial_seed"]() if generator is None else generator.initial_seed()


def _get_rng_state() -> Any:
    ours = globals()["_spdl_torch"]
    generator = ours.generator()
    return ours.originals["get_rng_state"]() if generator is None else generator.get_state()


def _set_rng_state(new_state: torch.Tensor) -> None:
    ours = globals()["_spdl_torch"]
    generator = ours.generator()
    if generator is None:
        ours.originals["set_rng_state"](new_state)
    else:
        generator.set_state(new_state)
