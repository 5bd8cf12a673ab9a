"""Who works for a new iterator: its crew, with the seats where its workers begin."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset

from ...late_imports import collected_later
from .placing import moved
from .vouching import seems_safe

if TYPE_CHECKING:
    from ...io._transfer.kept import Shelf
    from ...observe.verdict.placement import Placement
    from ..child_process.process_seats import ProcessSeats
    from ..workers.doubts import Doubts
    from ..workers.load_spec import LoadSpec
    from ..workers.transfer_stage import DeviceStage
    from .base_loader import BaseLoader
    from .crew import Crew

_ON_TRIAL = "the GIL held the threads up, and processes are on trial"


def import_workers(loader: BaseLoader[Any]) -> None:
    """Import what a loader with workers needs, most likely. Called when it is made: 45 modules are
    10 ms for which the first batch need not wait, and who loads without workers never."""
    functions = loader.collate_fn, loader.worker_init_fn
    may_move = loader.isolation == "auto" and seems_safe(loader.dataset, *functions)
    with collected_later():
        from . import crew  # noqa: F401

        if may_move:
            from . import mover  # noqa: F401
        if may_move or loader.isolation == "thread":
            from ..workers import thread_seats  # noqa: F401
        else:
            from ..child_process import process_seats  # noqa: F401


def open_crew(
    loader: BaseLoader[Any],
    placement: Placement,
    spec: LoadSpec,
    stage: DeviceStage | None,
    shelf: Shelf | None,
) -> Crew:
    """Return a new iterator's crew, whose workers begin where ``placement`` says. Starts nobody."""
    # Imported by loaders with workers alone, and each kind of seats where there are such workers.
    with collected_later():
        from .crew import Crew

    loader._state.log_placement(placement)
    context = loader.multiprocessing_context
    if placement.num_processes:
        children = _processes(spec, stage, context=context, shelf=shelf)
        children.placement = placement
        return Crew(spec, children, stage)
    with collected_later():
        from ..workers.thread_seats import ThreadSeats

    threads = ThreadSeats(spec, stage)
    threads.placement = placement
    if not loader._may_move:
        return Crew(spec, threads, stage)
    with collected_later():
        from .mover import Mover

    number = loader._num_processes_at_first

    def open_children(doubts: Doubts) -> ProcessSeats:
        of_children = spec._replace(num_workers=number, max_outstanding=threads.max_outstanding)
        children = _processes(of_children, stage, context=context, shelf=shelf, doubts=doubts)
        children.placement = moved(number, _ON_TRIAL)
        return children

    within, memory = not isinstance(loader.dataset, IterableDataset), loader._state.moving
    mover = Mover(threads, open_children, memory, stage, within_epochs=within)
    return Crew(spec, threads, stage, mover)


def _processes(spec: LoadSpec, stage: DeviceStage | None, **options: Any) -> ProcessSeats:
    # torch.multiprocessing is imported, and a process started, only where it is needed.
    with collected_later():
        from ..child_process.process_seats import ProcessSeats

    return ProcessSeats(spec, stage, **options)
