"""All patches of the process that loading needs, in one place.

Threads share the generators of ``random``, ``numpy.random`` and torch, and torch keeps the result
of ``get_worker_info()`` in one module global. User code reaches all of these through functions of
modules, often imported by name long before a loader exists. On a thread that runs user code for a
loader these functions have to use that thread's own; on all other threads they work as before,
after a check of the calling thread (50 to 150 ns). ``docs/explanation/randomness.md`` has
the table of the patches: what is changed, and what escapes it.

They are installed when the first loader starts, and stay: removing them would race with threads
that are inside a patched function.
"""

from __future__ import annotations

import _random
import functools
import random
import sys
import threading
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data._utils import worker as torch_worker

from ...handlers import start
from ...locks import lock_held_at_forks
from . import dispatch

if TYPE_CHECKING:
    from .streams import SampleStreams


class OfThread(threading.local):
    """What each thread has for itself."""

    # Defaults on the class: reading them is ten times faster than handling a missing attribute.
    streams: SampleStreams | None = None
    worker_info: Any = None


of_thread = OfThread()
"""The values of the calling thread. ``streams``: its generators; None = the process's.
``worker_info``: the result of ``get_worker_info()``; None = torch's own."""


def drawn_from() -> torch.Generator:
    """Return the generator from which torch draws on this thread unless one is named: that of a
    sample while a loader makes it, else torch's global one."""
    streams = of_thread.streams
    return torch.default_generator if streams is None else streams.generator()


_lock = lock_held_at_forks()
_key_lock = lock_held_at_forks()  # not held by a thread that may be in a signal's handler
_have_functions = _has_copies = False
_is_led_by_key: bool | None = None


def install() -> bool:
    """Install every patch, unless that is done. Return False if this torch has no dispatch key to
    redirect the draws of one thread.

    Ctrl-C may come between any two steps, and the next loader then takes all of them again: each
    leaves alone what it has done before. The key is installed on a thread that no signal's handler
    interrupts, and which ends by itself.
    """
    if _is_led_by_key is None:  # asked for every batch
        install_functions()
        # No daemon: where Ctrl-C ends the program, Python waits for it, which takes milliseconds.
        installing = threading.Thread(target=_install_key, name="spdl-install", daemon=False)
        start(installing)
        installing.join()
    return bool(_is_led_by_key)


def _install_key() -> None:
    global _is_led_by_key
    with _key_lock:
        if _is_led_by_key is None:
            _is_led_by_key = dispatch.install(of_thread)


def install_functions() -> None:
    """Install every patch but the key, which takes most of the time, and which a thread can do
    without where the process's default generator is its alone."""
    global _have_functions
    with _lock:
        if not _have_functions:
            _install_torch_seeding()
            _install_python()
            _install_numpy()
            _install_worker_info()
            _have_functions = True


def install_for_copies() -> None:
    """Install what children that are about to be forked should not install by themselves: the first
    ones of this process do without the key until they need it, so that nobody waits for it; the
    next epoch's would all need it again, which takes each of them 10 ms, and 16 MB of its own.
    """
    global _has_copies
    if _has_copies:
        install()
    else:
        install_functions()
        _has_copies = True


def without_key(what: str) -> RuntimeError:
    """Return the error where this torch cannot do what was asked. ``what``: that, in words."""
    return RuntimeError(
        f"DataLoader: {what}, but torch {torch.__version__} cannot redirect the random draws of "
        "one thread, so samples would draw from the generators of the whole process. Load in "
        'processes (isolation="process", with num_workers >= 1), or install another release of '
        "torch."
    )


def can_see_draws() -> bool:
    """Return whether :func:`install` is done."""
    return _is_led_by_key is not None


_Core = _random.Random


class _Primitives(_Core):
    """The primitives on which the methods of ``random.Random`` build.

    The class stands between ``random.Random`` and its C base, so ``super().seed()`` in the former
    calls the method here.
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
    """The class of the hidden object whose methods are the functions of ``random``."""

    @property
    def gauss_next(self) -> float | None:
        """The second of the two numbers that ``gauss`` makes at once."""
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
        """Pickle as a plain ``random.Random``, for processes without this class."""
        return random.Random, (), self.getstate()


def _install_python() -> None:
    process: Any = getattr(random, "_inst", None)
    if type(process) not in (random.Random, _ProcessRandom):
        return  # another Python, or other code has patched it
    if type(process) is random.Random:
        for name in ("random", "getrandbits"):
            _look_like(getattr(_Primitives, name), getattr(random, name))
        process.__class__ = _ProcessRandom
    random.random = process.random
    random.getrandbits = process.getrandbits


# Functions that are not methods of the hidden object, and the methods that do the same.
_NUMPY_FUNCTIONS = {"ranf": "random_sample", "sample": "random_sample", "seed": "seed"}


def _install_numpy() -> None:
    process = getattr(np.random.mtrand, "_rand", None)
    if process is None:
        return  # another numpy
    for name in dir(np.random):
        function = getattr(np.random, name)
        if getattr(function, "__self__", None) is process and not _is_ours(function):
            own = _numpy_method(function.__func__)
            # Bound like numpy's own: programs ask these functions for their generator.
            setattr(np.random, name, types.MethodType(own, process))
    for name, method in _NUMPY_FUNCTIONS.items():
        if not _is_ours(function := getattr(np.random, name)):
            setattr(np.random, name, _numpy_function(function, method))


def _is_ours(function: Any) -> bool:
    """Return whether a function of numpy's has been replaced: numpy wraps none of its own."""
    return hasattr(function, "__wrapped__")


def _numpy_method(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def dispatch(process: Any, /, *args: Any, **kwargs: Any) -> Any:
        streams = of_thread.streams
        return original(process if streams is None else streams.numpy(), *args, **kwargs)

    return dispatch


def _numpy_function(original: Callable[..., Any], method: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        streams = of_thread.streams
        if streams is None:
            return original(*args, **kwargs)
        return getattr(streams.numpy(), method)(*args, **kwargs)

    return dispatch


def _look_like(function: Any, original: Any) -> None:
    """Give a function the name, the documentation and the signature of a builtin method."""
    for name in ("__module__", "__name__", "__qualname__", "__doc__", "__text_signature__"):
        setattr(function, name, getattr(original, name))


def _install_torch_seeding() -> None:
    redirects = {
        "manual_seed": _manual_seed,
        "seed": _seed,
        "initial_seed": _initial_seed,
        "get_rng_state": _get_rng_state,
        "set_rng_state": _set_rng_state,
    }
    if "_spdl_torch" not in vars(torch.random):
        originals = {}
        for name in redirects:
            function = getattr(torch.random, name)
            originals[name] = types.FunctionType(
                function.__code__, function.__globals__, name, function.__defaults__
            )
        # The new code runs with torch.random's globals: put what it needs there.
        vars(torch.random)["_spdl_torch"] = _Redirect(originals)
    for name, redirect in redirects.items():
        getattr(torch.random, name).__code__ = redirect.__code__


class _Redirect:
    """The redirection of torch's seeding functions to this thread's generator, if it has one."""

    def __init__(self, originals: dict[str, Any]) -> None:
        self._originals = originals

    def call(self, name: str, method: str, *args: Any) -> Any:
        """Call this method of the thread's generator; if it has none, the function of torch's."""
        streams = of_thread.streams
        if streams is None:
            return self._originals[name](*args)
        return getattr(streams.generator(), method)(*args)


def _manual_seed(seed: Any) -> Any:
    return globals()["_spdl_torch"].call("manual_seed", "manual_seed", int(seed))


def _seed() -> Any:
    return globals()["_spdl_torch"].call("seed", "seed")


def _initial_seed() -> Any:
    return globals()["_spdl_torch"].call("initial_seed", "initial_seed")


def _get_rng_state() -> Any:
    return globals()["_spdl_torch"].call("get_rng_state", "get_state")


def _set_rng_state(new_state: torch.Tensor) -> None:
    globals()["_spdl_torch"].call("set_rng_state", "set_state", new_state)


def _install_worker_info() -> None:
    # The new code runs with the globals of torch's module: put what it needs there.
    vars(torch_worker)["_spdl_torch_of_thread"] = of_thread
    vars(torch_worker)["_spdl_torch_sys"] = sys
    torch_worker.get_worker_info.__code__ = _get_worker_info.__code__


def _get_worker_info() -> Any:
    module = globals()
    info = module["_spdl_torch_of_thread"].worker_info
    if info is None:
        return module["_worker_info"]
    # torch's collate puts every batch into shared memory when it runs in a worker; threads do not
    # need that.
    caller = module["_spdl_torch_sys"]._getframe(1).f_globals.get("__name__")
    return None if caller == "torch.utils.data._utils.collate" else info
