"""The process's generators, led to a worker thread's own where a worker thread draws.

Threads share the generators of ``random``, ``numpy.random`` and torch. User code reaches them by
functions of modules, often imported by name long before a loader exists. Three ways lead those
functions to the generators of the thread that calls, if it is one that has its own:

- torch's seeding functions take no generator: their code is replaced.
- ``random``'s functions are methods of one hidden object. It is made an instance of a subclass
  whose primitives (``random()``, ``getrandbits()``, seed and state) ask for the thread; all that
  is written in Python on top of them follows, whenever it was imported. The two primitives
  themselves, imported by name before, are C functions and escape.
- ``numpy.random``'s functions are C: the module's names are replaced. Names imported before
  escape, as do ``numpy.random.mtrand._rand`` and compiled code.

On all other threads each asks once (50 to 150 ns) and goes on as before. Installed when the
first loader that needs it starts, for good: taking it out again would race with those who draw.
"""

from __future__ import annotations

import _random
import functools
import random
import threading
import types
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Generators", "install", "of_thread", "process_generators_kept"]


class Generators(Protocol):
    """What a thread draws from, each ready for the sample that it works on."""

    def generator(self) -> torch.Generator:
        """torch's."""

    def python(self) -> random.Random:
        """In place of the module ``random``'s."""

    def numpy(self) -> np.random.RandomState:
        """In place of the module ``numpy.random``'s."""


class _OfThread(threading.local):
    streams: Generators | None = None  # on the class: ten times faster than a missing attribute


of_thread = _OfThread()
"""``of_thread.streams``: the generators of this thread; None = the process's."""

_lock = threading.Lock()
_is_installed = False


def install() -> None:
    """Lead drawing and seeding to ``of_thread.streams`` from now on; once is enough."""
    global _is_installed
    with _lock:
        if not _is_installed:
            _install_torch()
            _install_python()
            _install_numpy()
            _is_installed = True


@contextmanager
def process_generators_kept() -> Iterator[None]:
    """Put torch's, Python's and numpy's global generators back as they were.

    Around ``worker_init_fn``, which in a worker process may seed all three (Lightning's does).
    What it calls by a name that escapes would seed the trainer's.
    """
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])


# -- random ----------------------------------------------------------------------------------

_Core = _random.Random


class _Primitives(_Core):
    """What the methods of ``random.Random`` are made of.

    Stands between ``random.Random`` and its C base, so that ``super().seed()`` there comes here.
    """

    __slots__ = ()

    def random(self) -> float:
        streams = of_thread.streams
        return _core_random(self) if streams is None else streams.python().random()

    def getrandbits(self, k: int, /) -> int:
        streams = of_thread.streams
        return _core_bits(self, k) if streams is None else streams.python().getrandbits(k)

    def seed(self, *args: Any) -> None:
        streams = of_thread.streams
        _Core.seed(self if streams is None else streams.python(), *args)

    def getstate(self) -> Any:
        streams = of_thread.streams
        return _Core.getstate(self if streams is None else streams.python())

    def setstate(self, state: Any, /) -> None:
        streams = of_thread.streams
        _Core.setstate(self if streams is None else streams.python(), state)


_core_random, _core_bits = _Core.random, _Core.getrandbits


class _ProcessRandom(random.Random, _Primitives):
    """The class of the object behind the module ``random``."""

    @property
    def gauss_next(self) -> float | None:
        """The second of two numbers that ``gauss`` makes at once."""
        streams = of_thread.streams
        where = self if streams is None else streams.python()
        return where.__dict__["gauss_next"]  # type: ignore[no-any-return]

    @gauss_next.setter
    def gauss_next(self, value: float | None) -> None:
        streams = of_thread.streams
        where = self if streams is None else streams.python()
        where.__dict__["gauss_next"] = value

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as what it was, for processes that do not know this class."""
        return random.Random, (), self.getstate()


def _install_python() -> None:
    process = getattr(random, "_inst", None)
    if type(process) is not random.Random:
        return  # another Python, or somebody was here before
    process.__class__ = _ProcessRandom
    random.random = process.random
    random.getrandbits = process.getrandbits


# -- numpy.random ----------------------------------------------------------------------------

# Those that are no methods themselves, and the methods that do the same.
_NUMPY_FUNCTIONS = {"ranf": "random_sample", "sample": "random_sample", "seed": "seed"}


def _install_numpy() -> None:
    process = getattr(np.random.mtrand, "_rand", None)
    if process is None:
        return  # another numpy
    methods = {
        name: name
        for name in dir(np.random)
        if getattr(getattr(np.random, name), "__self__", None) is process
    }
    for name, method in {**methods, **_NUMPY_FUNCTIONS}.items():
        setattr(np.random, name, _numpy_dispatcher(name, getattr(np.random, name), method))


def _numpy_dispatcher(name: str, original: Callable[..., Any], method: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        streams = of_thread.streams
        if streams is None:
            return original(*args, **kwargs)
        return getattr(streams.numpy(), method)(*args, **kwargs)

    # Pickled by its name, it is numpy's own function in a process that has no loader.
    dispatch.__module__, dispatch.__qualname__ = "numpy.random", name
    return dispatch


# -- torch's seeding functions ---------------------------------------------------------------


def _install_torch() -> None:
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
    torch.random._spdl_torch = _Redirect(originals)  # type: ignore[attr-defined]
    for name, redirect in redirects.items():
        getattr(torch.random, name).__code__ = redirect.__code__


class _Redirect:
    """Finds the generator of this thread, or torch's own function."""

    def __init__(self, originals: dict[str, Any]) -> None:
        self.originals = originals

    def generator(self) -> torch.Generator | None:
        """This thread's generator; None on threads that have none."""
        streams = of_thread.streams
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
