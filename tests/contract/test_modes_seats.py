"""Modes of torch reach user code in every seat as they reach a worker that torch forks."""

from __future__ import annotations

import functools
import threading
from typing import Any

import pytest
import torch
from _datasets import Made
from _loader_helpers import assert_threads_end
from _seats import FORKED, NONE, THREADS, in_seats
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from spdl_torch import DataLoader


class OnesForZeros(TorchFunctionMode):
    """Changes what a function of torch returns."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (torch.ones if func is torch.zeros else func)(*args, **(kwargs or {}))


def look(index: int) -> Any:
    """A sample that shows the modes under which it is made."""
    weight = torch.ones(2, 2, requires_grad=True)
    product = weight @ weight
    is_half = product.dtype is torch.bfloat16
    return index, torch.zeros(1).item(), is_half, product.requires_grad, product.detach()


MODES = {
    "none": lambda: torch.enable_grad(),
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "function mode": OnesForZeros,
}


@functools.cache
def of_torch(mode: str) -> str:
    """What torch's workers make under a mode."""
    with MODES[mode]():
        return repr(list(FORKED.peer(Made(look, 8), batch_size=2)))


@in_seats(NONE, THREADS, FORKED)
@pytest.mark.parametrize("mode", MODES)
def test_modes_are_those_of_the_thread_that_begins_the_epoch(seat: Any, mode: Any) -> None:
    """As in torch's forked workers; what is made under inference mode can be used outside it."""
    loader = seat.loader(Made(look, 8), batch_size=2)
    with MODES[mode]():
        batches = list(loader)
    again = [batch for batch in loader if seat.num_workers]
    assert repr(batches) == of_torch(mode)
    assert again == [] or again[0][1].sum() == 0, "each epoch has its own"
    if not seat.are_processes and seat.num_workers:
        torch.ones(2, 2, requires_grad=True).mul(batches[0][4]).sum().backward()


class LastWord:
    """Is told of the modes of the thread that it belongs to when that ends."""

    def __init__(self, found: list[int]) -> None:
        self.found = found

    def __del__(self) -> None:
        self.found.append(len(_get_current_function_mode_stack()))


def test_threads_end_without_function_modes() -> None:
    """torch would let go of what a thread leaves after Python's end of it, and ask for the GIL: as
    the interpreter exits, that aborts the process."""
    of_thread, found = threading.local(), list[int]()

    def look_last(index: int) -> int:
        of_thread.word = getattr(of_thread, "word", None) or LastWord(found)
        return len(_get_current_function_mode_stack())

    with OnesForZeros():
        batches = list(DataLoader(Made(look_last, 8), num_workers=2, isolation="thread"))
    assert_threads_end()
    assert sum(batches).item() == 8, "each sample was made in the mode"
    assert found
    assert not any(found)
