"""Every patch of the process that loading needs: the one room for them.

Threads share the generators of ``random``, ``numpy.random`` and torch, and torch keeps the answer
of ``get_worker_info()`` in one module global. User code reaches all of these by functions of
modules, often imported by name long before a loader exists. On a thread that runs user code for a
loader they have to mean that thread's own; on all other threads they do what they always did, after
one look at which thread calls (50 to 150 ns). :data:`PATCHES` is the table of what is done.

They are installed when the first loader starts, and stay: taking them out would race with threads
that are inside.
"""

from __future__ import annotations

import _random
import functools
import random
import sys
import threading
import types
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.utils.data._utils import worker as torch_worker

from . import dispatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["PATCHES", "Generators", "Patch", "install", "of_thread", "process_generators_kept"]


class Patch(NamedTuple):
    """One row of the table."""

    target: str
    """The function or object whose meaning depends on the thread from then on."""
    way: str
    """How it is led there."""
    escapes: str
    """Calls that keep their old meaning on a loader's threads, too."""


PATCHES = (
    Patch(
        "torch's random operators (rand, uniform_, bernoulli_, ...)",
        "kernels under a dispatch key that only a thread of a loader includes",
        "draws on an accelerator, draws that name a generator, threads of the dataset's own",
    ),
    Patch(
        "torch.manual_seed, seed, initial_seed, get_rng_state, set_rng_state",
        "their code is replaced, so names imported before follow",
        "the methods of torch.default_generator",
    ),
    Patch(
        "the functions of random",
        "the class of the hidden object whose methods they are, and its two primitives by name",
        "random.random and random.getrandbits, imported by name before the first loader",
    ),
    Patch(
        "the functions of numpy.random",
        "the names in the module",
        "names imported before the first loader; numpy.random.mtrand._rand; compiled code",
    ),
    Patch(
        "torch.utils.data.get_worker_info",
        "its code is replaced, so names imported before follow",
        "torch.utils.data._utils.worker._worker_info, the global that it read",
    ),
)


class Generators(Protocol):
    """Where a thread's draws come from, each ready for the sample that it works on."""

    def lead(self) -> torch.Generator:
        """torch's, for an operator that is about to draw."""

    def generator(self) -> torch.Generator:
        """torch's."""

    def python(self) -> random.Random:
        """The one in place of the module ``random``'s."""

    def numpy(self) -> np.random.RandomState:
        """The one in place of the module ``numpy.random``'s."""


class _OfThread(threading.local):
    # On the class: ten times faster than a missing attribute.
    streams: Generators | None = None
    worker_info: Any = None


of_thread = _OfThread()
"""``streams``: the generators of this thread; None = the process's. ``worker_info``: what
``get_worker_info()`` answers here; None = what torch says."""

_lock = threading.Lock()
_is_led_by_key: bool | None = None


def install() -> bool:
    """Install every patch; once is enough. False: this torch has no dispatch key to lead its draws,
    so that threads have to enter a ``FunctionMode``.
    """
    global _is_led_by_key
    with _lock:
        if _is_led_by_key is None:
            _install_torch_seeding()
            _install_python()
            _install_numpy()
            _install_worker_info()
            _is_led_by_key = dispatch.install(of_thread)
    return _is_led_by_key


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
        gauss: float | None = where.__dict__["gauss_next"]
        return gauss

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


def _install_torch_seeding() -> None:
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
    vars(torch.random)["_spdl_torch"] = _Redirect(originals)
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


# -- torch's get_worker_info -----------------------------------------------------------------


def _install_worker_info() -> None:
    # The new code runs with the globals of torch's module: what it needs is put there.
    vars(torch_worker)["_spdl_torch_of_thread"] = of_thread
    vars(torch_worker)["_spdl_torch_sys"] = sys
    torch_worker.get_worker_info.__code__ = _get_worker_info.__code__


def _get_worker_info() -> Any:
    module = globals()
    info = module["_spdl_torch_of_thread"].worker_info
    if info is None:
        return module["_worker_info"]
    # torch's collate would put every batch into shared memory when it finds itself in a worker;
    # a thread needs none.
    caller = module["_spdl_torch_sys"]._getframe(1).f_globals.get("__name__")
    return None if caller == "torch.utils.data._utils.collate" else info
