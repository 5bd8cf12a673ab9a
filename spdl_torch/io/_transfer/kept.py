"""The pinned memory of a loader between its epochs.

Locking pages takes longer than copying them, and nobody launches a kernel meanwhile. So the
transfer of an epoch, with its slabs and the memory of its batches, serves the next one. Between
epochs it is the keeper's, which the loader has. It goes with the loader, and before that

- when the system refuses to lock memory, whoever asks for it, or
- when another loader begins without any, and what all keep is more than a share of the memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from ...machine.limits import Limits
from . import cuda
from .region import keepers
from .transfer import PINS_AT_HAND_OVER, Transfer

if TYPE_CHECKING:
    import torch


_SHARE_OF_MEMORY = 8
"""Of the memory that is available, the loaders that wait keep one part in so many altogether."""


class TransferKeeper:
    """Lends transfers, and keeps one of those that come back. Any thread may use it."""

    def __init__(self) -> None:
        self._idle: list[Transfer] = []  # one at most; each operation on it is atomic
        keepers.add(self)

    def lend(self, device: torch.device) -> tuple[Transfer, Callable[[], None]]:
        """Return a transfer to that device, the one that is kept if it goes there, and the function
        that returns it.

        Raises: RuntimeError: torch finds no CUDA, or no such device.
        """
        place = cuda.resolve(device)  # raises in a process that was forked from one with a loan
        try:
            transfer = self._idle.pop()
        except IndexError:
            transfer = None
        if transfer is None or transfer._backend.device != place:
            _make_room()
            transfer = Transfer(place, num_slabs=3 if PINS_AT_HAND_OVER else 2)
        else:
            transfer.rest()  # slabs that are still lent when processes are forked are not kept
        return transfer, partial(self._take_back, transfer, os.getpid())

    def _take_back(self, transfer: Transfer, pid: int) -> None:
        """Keep a transfer that was lent, in the process that has its memory: in one forked from
        it, it cannot be used."""
        if pid == os.getpid():
            transfer.rest()
            self._idle[:] = [transfer]

    @property
    def idle_bytes(self) -> int:
        """The bytes of pinned memory that nobody uses."""
        return sum(each.idle_bytes for each in self._idle.copy())

    def let_go(self) -> None:
        """Give that memory back to the system."""
        self._idle.clear()


def _make_room() -> None:
    """Let loaders that wait let go of their memory, in the order of their first epochs, until what
    they keep is no more than their share.
    """
    waiting = {keeper: size for keeper in keepers.now() if (size := keeper.idle_bytes)}
    available = Limits.of_this_machine().memory_bytes if waiting else None
    if available is None:
        return
    kept = sum(waiting.values())
    for keeper, size in waiting.items():
        if kept * _SHARE_OF_MEMORY <= available:
            return
        keeper.let_go()
        kept -= size
