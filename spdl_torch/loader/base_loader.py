"""The part of a ``DataLoader`` that its iterators use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeVar

from torch.utils.data import DataLoader as TorchDataLoader, IterableDataset

from ..autotune.workers import AutoWorkers
from .placing import placement_of, starts_threads

if TYPE_CHECKING:
    from fractions import Fraction

    import torch

    from ..autotune.tuning import TuningState
    from ..observe.verdict.placement import Placement
    from .loader_state import LoaderState

T_co = TypeVar("T_co", covariant=True)


class BaseLoader(TorchDataLoader[T_co]):
    """torch's loader with the options that this package adds, and its state between epochs."""

    device: torch.device | str | int | None
    isolation: Literal["auto", "thread", "process"]
    seed: int | None
    rng: Literal["sample", "worker"]
    on_error: Literal["raise", "skip"]
    error_budget: float | Fraction | None
    replace: bool
    stats: bool
    _state: LoaderState

    @property
    def _is_tuned(self) -> bool:
        """Whether ``num_workers="auto"`` may change the number of workers while they run.

        It may only where that affects nothing but the speed. The first number stays for an
        iterable dataset, which divides itself among its workers, and with ``rng="worker"``, where
        each worker has its own random stream.
        """
        return (
            isinstance(self.num_workers, AutoWorkers)
            and self.stats
            and not isinstance(self.dataset, IterableDataset)
            and self.rng != "worker"
        )

    def _placement(self) -> Placement:
        """Return where the workers live, or will live in the next epoch, and why."""
        return placement_of(
            self.dataset,
            int(self.num_workers),
            isolation=self.isolation,
            collate_fn=self.collate_fn,
            worker_init_fn=self.worker_init_fn,
            asks_for_threads=starts_threads(self.multiprocessing_context),
        )

    def _tuning_state(self) -> TuningState:
        """Return what tuning has found so far, over all epochs. Requires ``_is_tuned``."""
        from ..autotune.tuning import TuningState  # for tuned workers alone

        state = self._state.tuning
        if state is None:
            assert isinstance(self.num_workers, AutoWorkers), "guaranteed by _is_tuned"
            are_processes = self._placement().num_processes > 0
            state = TuningState(self.num_workers.tuning, "DataLoader", are_processes=are_processes)
            self._state.tuning = state
        return state
