"""What a new iterator opens: the backend that makes its batches, and what these go through on their
way to the loop, pinned memory or the transfer to a device."""

from __future__ import annotations

import functools
import logging
import os
import sys
import weakref
from typing import TYPE_CHECKING, Any, cast

from torch.utils.data._utils import pin_memory as _torch_pin_memory
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from ..errors import UnsupportedOptionError
from ..lazy_names import collected_later
from .backends.inline import InlineWorker
from .backends.transfer_stage import DeviceStage, check_device
from .error_notes import add_thread_note
from .placing import placement_of, vouching_for
from .rng.patches import install, without_key

if TYPE_CHECKING:
    from .backends.backend import Backend, LoadSpec
    from .dataloader import DataLoader


_logger = logging.getLogger("spdl_torch.data")

has_processes = os.name == "posix"
"""Whether this package starts worker processes here; on Windows torch does."""


def import_workers(loader: DataLoader[Any]) -> None:
    """Import what a loader with workers needs, most likely. Called when it is made: 45 modules are
    10 ms for which the first batch need not wait, and who loads without workers never."""
    on_threads = loader.isolation == "thread" or (
        loader.isolation == "auto" and vouching_for(loader, looks_at_data=False).is_safe
    )
    with collected_later():
        if on_threads:
            from .backends import threads  # noqa: F401
        else:
            from .backends.processes import processes  # noqa: F401


def open_backend(loader: DataLoader[Any], spec: LoadSpec, stage: DeviceStage | None) -> Backend:
    """Return a new iterator's backend. Starts nobody."""
    if not spec.num_workers:
        return InlineWorker(spec, stage)
    placement = placement_of(loader)  # once: it looks at every object of a list
    # Imported where there are such workers: so is torch.multiprocessing.
    if not (placement.num_processes or install()):
        raise without_key(f"its workers would be threads: {placement.reason}")
    loader._state.log_placement(placement)
    if placement.num_processes:
        with collected_later():
            from .backends.processes.hearing import Unpacking
            from .backends.processes.processes import Processes

        if loader._state.unpacking is None:
            loader._state.unpacking = Unpacking()
        unpacking = loader._state.unpacking
        return Processes(spec, stage, placement, unpacking, loader.multiprocessing_context)
    with collected_later():
        from .backends.threads import Threads

    return Threads(spec, stage, placement)


def await_ended(seconds: float) -> None:
    """Wait so long for the worker processes that were told to end."""
    if (process := sys.modules.get("spdl_torch.loader.backends.processes.process")) is not None:
        process.reap(seconds)


def torchs_iterator(loader: DataLoader[Any]) -> _MultiProcessingDataLoaderIter:
    """Return torch's own iterator, for workers in processes where ``has_processes`` is False.

    Raises: UnsupportedOptionError: the loader has options that torch's does not know.
    """
    asked = {
        f"device={loader.device!r}": check_device(loader.device) is not None,
        'on_error="skip"': loader.on_error != "raise",
        "a state that was loaded": loader._state.position.to_resume is not None,
    }
    for what in (what for what, is_asked in asked.items() if is_asked):
        raise UnsupportedOptionError(
            f"DataLoader: {what} has no effect on Windows where workers are processes. Pass "
            'isolation="thread" if the dataset may be used by several threads, or num_workers=0.'
        )
    _say_whose_processes()
    return _MultiProcessingDataLoaderIter(loader)


@functools.cache
def _say_whose_processes() -> None:
    _logger.warning(
        "DataLoader: on Windows torch's own worker processes load: without states within an epoch, "
        "statistics of the workers, and random streams of each sample."
    )


def open_device_stage(loader: DataLoader[Any]) -> DeviceStage | None:
    """Return a new iterator's transfer stage; None = host memory.

    Raises: RuntimeError: torch finds no CUDA, or no such device.
    """
    target = check_device(loader.device)
    if target is None:
        return None
    from ..io._transfer.kept import TransferKeeper  # copies and pinned memory, for a device alone

    if loader._state.keeper is None:
        loader._state.keeper = TransferKeeper()
    transfer, give_back = loader._state.keeper.lend(target)
    stage = DeviceStage(transfer, stats=loader.stats)
    # When the threads have ended that use it, however the epoch ends.
    weakref.finalize(stage, give_back).atexit = False
    return stage


def pinned(batch: Any, device: str | None) -> Any:
    """Return the batch in pinned memory, as torch's ``pin_memory=True`` does. Raises: what a part's
    own ``pin_memory`` raises, with a note."""
    from ..io._transfer.cuda import captures_unharmed  # brings all that a device needs

    # torch's allocator locks pages, and looks at the events of memory that was given back.
    try:
        with captures_unharmed():
            return cast("Any", _torch_pin_memory).pin_memory(batch, device)
    except BaseException as error:
        add_thread_note(error, f"in pin_memory() of a batch of type {type(batch).__name__}")
        raise
