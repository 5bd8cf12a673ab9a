"""Copies of large tensors by several threads, where there are many cores.

One thread copies 6 to 12 GB/s, a GPU takes several times that from pinned memory. So what was not
made in pinned memory (a user's ``collate_fn`` may make it anywhere) is copied there by a few. They
are few because decoding needs the cores, too, and because all share the memory bandwidth.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from ...machine.limits import whole_cores
from .slabs import copy_alone

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

LEAST_BYTES = 8 << 20
"""The size from which a tensor is copied by several threads: 1 ms for one of them."""

_PART_BYTES = 2 << 20
_MOST_THREADS = 4


class Team:
    """The threads of one transfer, made when they are first needed; they end with it.

    num_threads: with the caller's; None = one core is left to others, and at most 4.
    """

    def __init__(self, num_threads: int | None = None) -> None:
        self._num_threads = num_useful() if num_threads is None else num_threads
        self._helpers: ThreadPoolExecutor | None = None

    def copy(self, target: Tensor, source: Tensor) -> bool:
        """Copy a large tensor; return when all of it is done. False = nothing is done: the tensor
        is not large, or there is nobody to help.
        """
        num_helpers = self._num_threads - 1
        if num_helpers < 1 or source.nbytes < LEAST_BYTES or source.is_conj() or source.is_neg():
            return False
        if self._helpers is None:
            self._helpers = ThreadPoolExecutor(num_helpers, "spdl-copy")
        # Each takes the next part when it is done with one: a thread that starts late takes fewer.
        # A list's iterator needs no lock for it. With a GIL each part is taken once; without one,
        # two threads may take the same part, and both write the same bytes; none is passed over.
        parts = iter(parts_of(target, source))
        try:
            others = [self._helpers.submit(_copy, parts) for _ in range(num_helpers)]
        except RuntimeError:  # the interpreter exits: no threads any more
            others = []
        try:
            _copy(parts)
        finally:
            for other in others:
                if not other.cancel():  # else it has not begun, and there is nothing left to do
                    other.result()
        return True


def parts_of(target: Tensor, source: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return both tensors in parts of some 2 MB, cut where the target's memory is longest."""
    longest = max(
        (dim for dim, size in enumerate(target.shape) if size > 1),
        key=lambda dim: (target.stride(dim), target.shape[dim]),
        default=None,
    )
    if longest is None:
        return [(target, source)]
    size = target.shape[longest]
    rows = max(1, size * _PART_BYTES // max(1, source.nbytes))
    return [
        (target.narrow(longest, first, count), source.narrow(longest, first, count))
        for first in range(0, size, rows)
        for count in (min(rows, size - first),)
    ]


def _copy(parts: Iterable[tuple[Tensor, Tensor]]) -> None:
    for target, source in parts:
        copy_alone(target, source)


def num_useful() -> int:
    """Return how many threads copy faster than fewer, with a core left to others."""
    cores = whole_cores()
    return min(_MOST_THREADS, cores - 1) if cores > 2 else 1
