"""Modes of torch reach user code in every seat as they reach a worker that torch forks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from _datasets import Made
from _seats import FORKED, NONE, THREADS, in_seats
from torch.overrides import TorchFunctionMode


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


@in_seats(NONE, THREADS, FORKED)
@pytest.mark.parametrize("mode", MODES)
def test_modes_are_those_of_the_thread_that_begins_the_epoch(seat: Any, mode: Any) -> None:
    """As in torch's forked workers; what is made under inference mode can be used outside it."""
    loader, peer = (make(Made(look, 8), batch_size=2) for make in (seat.loader, seat.peer))
    with MODES[mode]():
        batches, want = list(loader), list(peer)
    again = [batch for batch in loader if seat.num_workers]
    assert repr(batches) == repr(want)
    assert again == [] or again[0][1].sum() == 0, "each epoch has its own"
    if not seat.are_processes and seat.num_workers:
        torch.ones(2, 2, requires_grad=True).mul(batches[0][4]).sum().backward()
