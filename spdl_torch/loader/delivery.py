"""What a loader's batches go through on their way to the loop: pinned memory, or the transfer to a
device."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, cast

from torch.utils.data._utils import pin_memory as _torch_pin_memory

from ..io._transfer.runtime import captures_unharmed
from .backends.device import check_device
from .error_notes import add_thread_note

if TYPE_CHECKING:
    import torch

    from .backends.transfer_stage import DeviceStage
    from .base_loader import BaseLoader

    Device = torch.device | str | int | None


def open_device_stage(
    loader: BaseLoader[Any], device: Device, *, stats: bool
) -> DeviceStage | None:
    """Return a new iterator's transfer stage; None = host memory.

    Raises: RuntimeError: torch finds no CUDA, or no such device.
    """
    target = check_device(device)
    if target is None:
        return None
    # Copies, pinned memory and their threads are imported for a device alone.
    from ..io._transfer.kept import TransferKeeper
    from .backends.transfer_stage import DeviceStage

    if loader._state.keeper is None:
        loader._state.keeper = TransferKeeper()
    loan, give_back = loader._state.keeper.lend(target)
    stage = DeviceStage(loan.transfer, stats=stats)
    # When the threads have ended that use it, however the epoch ends.
    weakref.finalize(stage, give_back).atexit = False
    return stage


def pinned(batch: Any, device: str | None) -> Any:
    """Return the batch in pinned memory, as torch's ``pin_memory=True`` does. Raises: what a part's
    own ``pin_memory`` raises, with a note."""
    # torch's allocator locks pages, and looks at the events of memory that was given back.
    try:
        with captures_unharmed():
            return cast("Any", _torch_pin_memory).pin_memory(batch, device)
    except BaseException as error:
        add_thread_note(error, f"in pin_memory() of a batch of type {type(batch).__name__}")
        raise
