"""Redirect the draws of torch's operators to a generator of the calling thread by a dispatch key.

torch's dispatcher looks at a set of keys for every operator call, and a thread can add a key to the
set for itself alone. This file uses a key that nothing else uses (``TESTING_ONLY_GenericMode``):
all operators fall through it at no cost, except those that draw random numbers. These get a kernel
that passes the thread's generator. A call that draws nothing therefore costs nothing, and draws
made in C++ (dropout), in TorchScript and by functions that were imported by name are redirected
like any other.

Only operators that draw by themselves have a kernel. All others draw through these: ``rand`` and
``randint`` fill a new tensor by ``uniform_`` and ``random_``. Under a TorchDispatchMode the inner
call is not seen; the first call of a compiled function runs under one.

The names are private to torch. Where one is missing or has another meaning, :func:`install` returns
False: threads cannot have streams of their own then.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from functools import partial
from itertools import compress, count
from typing import TYPE_CHECKING, Any

import torch

from ...scopes import scope

if TYPE_CHECKING:
    from .patches import OfThread

_KEY_NAME = "TESTING_ONLY_GenericMode"

DRAWING = (
    *("_sample_dirichlet", "_standard_gamma", "binomial", "poisson"),
    *("bernoulli.out", "bernoulli_.Tensor", "bernoulli_.float"),
    *("cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "uniform_"),
    *("multinomial", "multinomial.out"),
    *("normal.Tensor_Tensor", "normal.Tensor_Tensor_out"),
    *("normal.Tensor_float", "normal.Tensor_float_out"),
    *("normal.float_Tensor", "normal.float_Tensor_out"),
    *("random_", "random_.from", "random_.to", "randperm.generator_out"),
    *("rrelu_with_noise", "rrelu_with_noise.out", "rrelu_with_noise_"),
)
"""The operators of ``aten`` that take a generator and draw by themselves on the CPU."""


_C: Any = torch._C  # private, and without types
_Library: Any = torch.library.Library
_libraries: list[Any] = []  # keeps the registrations, which end with their library object
_key: Any = None


def _has_no_key(on: bool) -> None:
    assert not on, "guaranteed by the callers: install() has returned True"


lead: Callable[[bool], None] = _has_no_key
"""Switch redirection on or off for this thread's draws; set by :func:`install`. Takes 0.1 µs."""


def install(thread: OfThread) -> bool:
    """Register the kernels, once per process; takes 10 to 20 ms, most of it in torch, which notes
    for each of its 3,600 operators that this key has a kernel for all.

    Return False if this torch has no such key, or does not let a draw be redirected by it. Then
    nothing stays registered. Not called on the main thread: there a signal's handler may raise
    anything, which would be taken for an answer, and would find the trial's streams.
    """
    global _key, lead
    libraries: list[Any] = []
    try:
        key = _C._dispatch_key_parse(_KEY_NAME)
        if _C._dispatch_tls_is_dispatch_key_included(key):
            return False  # other code uses the key
        # Called twice a batch, so no function of Python's stands between.
        include = partial(_C._dispatch_tls_set_dispatch_key_included, key)
        below = _C._dispatch_keyset_full_after(key)
        libraries += [_Library(space, "IMPL", _KEY_NAME) for space in ("_", "aten")]
        libraries[0].fallback(torch.library.fallthrough_kernel)
        _keep_at_exit(libraries[0])
        for name in DRAWING:
            kernel = _kernel(_operator(name), below, thread)
            libraries[1].impl(name, kernel, _KEY_NAME, with_keyset=True)
        is_led = _redirects(include, thread)
    except Exception:  # whatever a release of torch has changed
        return False
    if is_led:
        _libraries.extend(libraries)
        _key, lead = key, include
    return is_led


def _keep_at_exit(library: Any) -> None:
    """Leave these kernels where they are when the program ends, after torch has taken out all
    others: a daemon thread may be in the middle of a sample, and its calls fall through them.
    """
    for finalizer in reversed(list(getattr(weakref.finalize, "_registry", ()))):  # one of the last
        found = finalizer.peek()
        if found is not None and found[0] is library:
            finalizer.atexit = False
            return


def _redirects(include: Callable[[bool], None], thread: Any) -> bool:
    """Return whether a draw asks its thread's streams for a generator."""
    thread.streams = trial = _Trial()
    try:
        include(True)
        torch.empty(1, device="cpu").uniform_()
    finally:
        thread.streams = None
        include(False)
    return trial.was_asked


class _Trial:
    """Streams that note whether they were asked for a generator."""

    was_asked = False

    def lead(self) -> torch.Generator:
        self.was_asked = True
        return torch.Generator()


def is_led() -> bool:
    """Return whether this thread's draws are redirected."""
    return _key is not None and bool(_C._dispatch_tls_is_dispatch_key_included(_key))


@scope
def not_redirected() -> Iterator[None]:
    """Let draws that name their generator go straight to it."""
    was_led = is_led()
    if was_led:
        lead(False)
    try:
        yield
    finally:
        if was_led:
            lead(True)


def _operator(name: str) -> torch._ops.OpOverload:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")  # type: ignore[no-any-return]  # by name


def _kernel(operator: torch._ops.OpOverload, below: Any, thread: OfThread) -> Callable[..., Any]:
    """Return a kernel that calls ``operator`` with the thread's generator if none is given.

    torch's dispatcher calls the kernel, and leaves out trailing arguments with default values.
    """
    redispatch: Any = operator._handle.redispatch_boxed
    arguments = operator._schema.arguments
    names = [argument.name for argument in arguments]
    are_tensors = (isinstance(argument.type, torch.TensorType) for argument in arguments)
    tensor_at, generator_at = next(compress(count(), are_tensors)), names.index("generator")

    def draw(keys: Any, *args: Any, generator: Any = None, **kwargs: Any) -> Any:
        if generator is None and args[tensor_at].is_cpu:  # all its tensors are on one device
            leader = thread.streams
            generator = None if leader is None else leader.lead()
        return redispatch(keys & below, *args, generator=generator, **kwargs)

    def draw_into(keys: Any, *args: Any, generator: Any = None, out: Any) -> Any:
        if generator is None and out.is_cpu:
            leader = thread.streams
            generator = None if leader is None else leader.lead()
        return redispatch(keys & below, *args, generator=generator, out=out)

    def draw_by_position(keys: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) > generator_at:
            assert len(args) == generator_at + 1, "no operator in DRAWING has arguments after it"
            return draw(keys, *args[:generator_at], generator=args[generator_at], **kwargs)
        return draw(keys, *args, **kwargs)

    if arguments[tensor_at].kwarg_only:
        assert names[tensor_at] == "out", "guaranteed by DRAWING: randperm alone takes no tensor"
        return draw_into
    return draw if arguments[generator_at].kwarg_only else draw_by_position
