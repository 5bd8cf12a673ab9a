"""Who works for a new iterator: its crew, with the seats of its workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...late_imports import collected_later
from .vouching import seems_safe

if TYPE_CHECKING:
    from ...observe.verdict.placement import Placement
    from ..workers.load_spec import LoadSpec
    from ..workers.transfer_stage import DeviceStage
    from .base_loader import BaseLoader
    from .crew import Crew


def import_workers(loader: BaseLoader[Any]) -> None:
    """Import what a loader with workers needs, most likely. Called when it is made: 45 modules are
    10 ms for which the first batch need not wait, and who loads without workers never."""
    functions = loader.collate_fn, loader.worker_init_fn
    on_threads = loader.isolation == "thread" or (
        loader.isolation == "auto" and seems_safe(loader.dataset, *functions)
    )
    with collected_later():
        from . import crew  # noqa: F401

        if on_threads:
            from ..workers import thread_seats  # noqa: F401
        else:
            from ..child_process import process_seats  # noqa: F401


def open_crew(
    loader: BaseLoader[Any],
    placement: Placement,
    spec: LoadSpec,
    stage: DeviceStage | None,
) -> Crew:
    """Return a new iterator's crew, whose workers are where ``placement`` says. Starts nobody."""
    # Imported by loaders with workers alone, and each kind of seats where there are such workers:
    # so is torch.multiprocessing.
    with collected_later():
        from .crew import Crew

    loader._state.log_placement(placement)
    if placement.num_processes:
        with collected_later():
            from ..child_process.process_seats import ProcessSeats

        children = ProcessSeats(spec, stage, context=loader.multiprocessing_context)
        children.placement = placement
        return Crew(spec, children, stage)
    with collected_later():
        from ..workers.thread_seats import ThreadSeats

    threads = ThreadSeats(spec, stage)
    threads.placement = placement
    return Crew(spec, threads, stage)
