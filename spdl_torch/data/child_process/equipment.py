"""What all worker processes of a crew are started with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..workers.device import most_regions
from .start_methods import context_of, forks

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...io._transfer.kept import Shelf
    from ...io._transfer.region import LimitedLocker, Region
    from ..workers.load_spec import LoadSpec
    from ..workers.transfer_stage import DeviceStage
    from .shared_blocks import SharedBlocks


class Equipment:
    """The start method of the processes, and the memory that they share with the trainer."""

    def __init__(
        self, context: Any, spec: LoadSpec, stage: DeviceStage | None, shelf: Shelf | None
    ) -> None:
        """``shelf``: has the slabs of the epoch before; None = those of this one are not kept.

        Raises: as ``context_of``.
        """
        self.context = context_of(context)
        self.are_copies = forks(self.context)
        """Whether the processes are forked: copies of this one and the thread that starts them."""
        self.near = None if stage is None else stage.near
        """The cores near the device of the batches; None = there is none, or all are alike."""
        self.shelf = shelf
        # Forked processes have the trainer's memory; others share the dataset's large arrays.
        self.blocks = None if self.are_copies else _shared_blocks()
        self._locker: LimitedLocker | None = None  # one bound for the slabs of all processes
        if stage is not None:
            self._locker = self._locker_of(stage, spec.max_outstanding, spec.num_workers)

    @property
    def lock(self) -> Callable[[Any], Region] | None:
        """What locks the pages of slabs; None = they stay pageable.

        They are locked only for a device stage, which knows when the GPU has copied. Otherwise
        pin_memory() has to find pageable memory: it then copies into pinned memory of its own,
        which torch does not reuse too early.
        """
        return None if self._locker is None else self._locker.region

    def grow(self, max_outstanding: int, num_processes: int) -> None:
        """Let slabs for so many batches be locked."""
        if self._locker is not None:
            self._locker.grow(most_regions(max_outstanding, num_processes))

    def all_have_theirs(self) -> None:
        """Free the slabs of more processes than there are now."""
        if self.shelf is not None:
            self.shelf.clear()

    def let_go(self) -> None:
        """Let go of the dataset's arrays; a process that is being started still has them."""
        self.blocks = None

    def _locker_of(
        self, stage: DeviceStage, max_outstanding: int, num_processes: int
    ) -> LimitedLocker:
        """Return the locker of the slabs, which goes on from epoch to epoch with them."""
        shelf = self.shelf
        if shelf is not None and shelf.locker is not None:
            shelf.locker.begin(most_regions(max_outstanding, num_processes))
            return shelf.locker
        locker = stage.limited(max_outstanding, num_processes)
        if shelf is not None:
            shelf.locker = locker
        return locker


def _shared_blocks() -> SharedBlocks | None:
    from .shared_blocks import CAN_SHARE_BLOCKS, SharedBlocks  # forked processes need none of it

    return SharedBlocks() if CAN_SHARE_BLOCKS else None
