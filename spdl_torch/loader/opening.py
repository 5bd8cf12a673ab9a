"""The backends of a loader: who makes the batches of a new iterator."""

from __future__ import annotations

import functools
import logging
import os
import sys
from typing import TYPE_CHECKING, Any

from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from ..errors import UnsupportedOptionError
from ..late_imports import collected_later
from .backends.device import check_device
from .backends.inline import InlineWorker
from .rng.patches import install, without_key
from .vouching import seems_safe

if TYPE_CHECKING:
    from .backends.backend import Backend
    from .backends.load_spec import LoadSpec
    from .backends.transfer_stage import DeviceStage
    from .base_loader import BaseLoader

_logger = logging.getLogger("spdl_torch.data")

has_processes = os.name == "posix"
"""Whether this package starts worker processes here; on Windows torch does."""


def import_workers(loader: BaseLoader[Any]) -> None:
    """Import what a loader with workers needs, most likely. Called when it is made: 45 modules are
    10 ms for which the first batch need not wait, and who loads without workers never."""
    functions = loader.collate_fn, loader.worker_init_fn
    on_threads = loader.isolation == "thread" or (
        loader.isolation == "auto" and seems_safe(loader.dataset, *functions)
    )
    with collected_later():
        if on_threads:
            from .backends import threads  # noqa: F401
        else:
            from .backends.processes import processes  # noqa: F401


def open_backend(loader: BaseLoader[Any], spec: LoadSpec, stage: DeviceStage | None) -> Backend:
    """Return a new iterator's backend. Starts nobody."""
    if not spec.num_workers:
        return InlineWorker(spec, stage)
    placement = loader._placement()  # once: it looks at every object of a list
    # Imported where there are such workers: so is torch.multiprocessing.
    if not (placement.num_processes or install()):
        raise without_key(f"its workers would be threads: {placement.reason}")
    loader._state.log_placement(placement)
    if placement.num_processes:
        with collected_later():
            from .backends.processes.hearing import Unpacking
            from .backends.processes.processes import Processes

        if loader._state.figures.unpacking is None:
            loader._state.figures.unpacking = Unpacking()
        unpacking = loader._state.figures.unpacking
        return Processes(spec, stage, placement, unpacking, loader.multiprocessing_context)
    with collected_later():
        from .backends.threads import Threads

    return Threads(spec, stage, placement)


def await_ended(seconds: float) -> None:
    """Wait so long for the worker processes that were told to end."""
    if (process := sys.modules.get("spdl_torch.loader.backends.processes.process")) is not None:
        process.reap(seconds)


def torchs_iterator(loader: BaseLoader[Any]) -> _MultiProcessingDataLoaderIter:
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
