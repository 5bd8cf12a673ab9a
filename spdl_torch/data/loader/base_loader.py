"""The part of a ``DataLoader`` that its iterators use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeVar

from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset

from ...autotune.workers import AutoWorkers
from .placing import declares_safe, is_vouched_for, placement_of

if TYPE_CHECKING:
    from fractions import Fraction

    import torch

    from ...autotune.tuning import TuningState
    from ...observe.verdict.placement import Placement
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
        # For loaders with workers alone, as below.
        from ..child_process.start_methods import starts_threads

        return placement_of(
            self.dataset,
            int(self.num_workers),
            isolation=self.isolation,
            collate_fn=self.collate_fn,
            worker_init_fn=self.worker_init_fn,
            moving=self._state.moving,
            asks_for_threads=starts_threads(self.multiprocessing_context),
        )

    def _is_vouched_for(self, placement: Placement) -> bool:
        """Return whether dataset and functions are known, or declared, to be safe on threads;
        False, without examining them, where each worker has a process.
        """
        if placement.num_processes:
            return False
        # "auto" puts workers on threads for no other reason.
        return self.isolation == "auto" or is_vouched_for(
            self.dataset, self.collate_fn, self.worker_init_fn
        )

    @property
    def _may_move(self) -> bool:
        """Whether workers on threads may move to processes."""
        is_open = self.isolation == "auto" and not self._state.moving.is_settled
        return is_open and not self._held_on_threads

    @property
    def _held_on_threads(self) -> str:
        """What keeps workers on threads from moving to processes; "" = nothing does.

        Children have to be forked, which needs neither pickling nor a guard in the script. While
        an epoch runs, any worker has to be able to make any batch. An iterable dataset moves
        between epochs if it says that it is safe on threads, and if no worker keeps it for the
        next epoch.
        """
        from ..child_process.start_methods import can_fork

        if not can_fork(self.multiprocessing_context):
            return "processes would not be forked: multiprocessing_context says so, or the platform"
        if self.rng != "sample":
            return f"with rng={self.rng!r} each worker makes its own batches"
        if not isinstance(self.dataset, IterableDataset):
            return ""
        if self.persistent_workers:
            return "with persistent_workers=True each keeps its part of the iterable dataset"
        if not declares_safe(self.dataset, self.collate_fn, self.worker_init_fn):
            return "the iterable dataset does not say thread_safe = True"
        return ""

    def _tuning_state(self) -> TuningState:
        """Return what tuning has found so far, over all epochs. Requires ``_is_tuned``.

        Workers that have moved to processes are tuned anew.
        """
        from ...autotune.tuning import TuningState  # for tuned workers alone

        are_processes, state = self._placement().num_processes > 0, self._state.tuning
        if state is None or state.are_processes is not are_processes:
            assert isinstance(self.num_workers, AutoWorkers), "guaranteed by _is_tuned"
            tuning, decisions = self.num_workers.tuning, () if state is None else state.decisions
            state = TuningState(tuning, "DataLoader", are_processes=are_processes)
            state.decisions.extend(decisions)
            self._state.tuning = state
        return state

    @property
    def _num_processes_at_first(self) -> int:
        """The number of processes to which workers on threads move."""
        if not self._is_tuned:
            return self.num_workers
        assert isinstance(self.num_workers, AutoWorkers), "guaranteed by _is_tuned"
        tuning = self.num_workers.tuning
        return AutoWorkers.to_begin_with(tuning, tuning.limits())
