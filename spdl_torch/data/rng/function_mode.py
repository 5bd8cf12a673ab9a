"""Redirect the draws of torch's functions to a generator by a mode of the calling thread.

This is the fallback where torch lacks the dispatch key of ``dispatch.py``. It gives the same bits,
but every torch call under it goes through a Python function (1 to 2 µs), and it does not see draws
inside C++ (dropout) and TorchScript.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from collections.abc import Callable

_FUNCTIONS = (
    *("_sample_dirichlet", "_standard_gamma", "bernoulli", "binomial", "multinomial", "normal"),
    *("poisson", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like"),
    *("randperm", "rrelu", "rrelu_"),
)
_METHODS = (
    *("bernoulli", "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_"),
    *("multinomial", "normal_", "random_", "uniform_"),
)
# Written in Python: the mode sees these functions, not the operators that they call.
_INIT = (
    *("kaiming_normal_", "kaiming_uniform_", "normal_", "orthogonal_", "sparse_"),
    *("trunc_normal_", "uniform_", "xavier_normal_", "xavier_uniform_"),
)

GENERATOR_AT: dict[Callable[..., Any], int | None] = {
    getattr(holder, name): None
    for holder, names in ((torch, _FUNCTIONS), (torch.Tensor, _METHODS), (torch.nn.init, _INIT))
    for name in names
    if hasattr(holder, name)
}
"""The place of the argument ``generator``, which is always the last; None = only by its name."""
GENERATOR_AT |= {torch._sample_dirichlet: 1, torch._standard_gamma: 1, torch.poisson: 1}
GENERATOR_AT |= {torch.binomial: 2, torch.rrelu: 4, torch.rrelu_: 4}
for _init in (getattr(torch.nn.init, name) for name in _INIT):
    GENERATOR_AT[_init] = list(inspect.signature(_init).parameters).index("generator")

_FILLS: dict[Callable[..., Any], Callable[..., torch.Tensor]] = {}
"""The functions that take no generator, as in torch 2.9, by what fills their result."""
if "generator" not in torch.ops.aten.rand_like.overloads():  # type: ignore[no-untyped-call]  # untyped in torch
    _FILLS |= {torch.rand_like: torch.Tensor.uniform_, torch.randn_like: torch.Tensor.normal_}
    _FILLS |= {torch.randint_like: torch.Tensor.random_}


class FunctionMode(TorchFunctionMode):
    """A mode in which torch's random functions on this thread draw from ``generator()``, unless
    they name a generator or draw on an accelerator.
    """

    def __init__(self, generator: Callable[[], torch.Generator]) -> None:
        super().__init__()
        self._generator = generator
        self._is_cpu_default: bool | None = None

    def enter(self) -> None:
        """Enter the mode on this thread."""
        self._is_cpu_default = None  # the default device may have changed
        super().__enter__()  # type: ignore[no-untyped-call]  # torch's has no types

    def leave(self) -> None:
        """Leave the mode."""
        super().__exit__(None, None, None)  # type: ignore[no-untyped-call]  # neither

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in GENERATOR_AT and self._draws_on_cpu(args, kwargs):
            args = args[: GENERATOR_AT[func]]  # without a None in the generator's place
            kwargs = {**kwargs, "generator": self._generator()}
            if func in _FILLS:
                return filled_as(_FILLS[func], *args, **kwargs)
        return func(*args, **kwargs)

    def _draws_on_cpu(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        given = (*args, *kwargs.values())  # out= is named
        if any(isinstance(each, torch.Generator) for each in given):
            return False
        device = kwargs.get("device")
        if device is not None:
            return torch.device(device).type == "cpu"
        tensors = [each for each in given if isinstance(each, torch.Tensor)]
        if tensors:
            return all(tensor.device.type == "cpu" for tensor in tensors)
        if self._is_cpu_default is None:
            # torch 2.9's get_default_device() raises once a default was set and taken back.
            self._is_cpu_default = torch.empty(0).device.type == "cpu"
        return self._is_cpu_default


def filled_as(
    fill: Callable[..., torch.Tensor],
    input: torch.Tensor,
    *bounds: int,
    generator: torch.Generator,
    low: int | None = None,
    high: int | None = None,
    requires_grad: bool = False,
    **options: Any,
) -> torch.Tensor:
    """Draw what ``rand_like(input, ...)`` or one of its kin would, as torch does."""
    bounds += tuple(bound for bound in (low, high) if bound is not None)
    drawn = fill(torch.empty_like(input, **options), *bounds, generator=generator)
    return drawn.requires_grad_(requires_grad)
