"""The part of a ``DataLoader`` that its iterators work with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeVar

from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset

from ...autotune.tuning import TuningState
from ...autotune.workers import AutoWorkers

if TYPE_CHECKING:
    from fractions import Fraction

    import torch

    from .loader_state import LoaderState

__all__ = ["BaseLoader"]

T_co = TypeVar("T_co", covariant=True)


class BaseLoader(TorchDataLoader[T_co]):
    """torch's loader with the options that this package adds, and what it keeps between epochs."""

    device: torch.device | str | int | None
    isolation: Literal["thread", "process"]
    seed: int | None
    rng: Literal["sample", "worker"]
    on_error: Literal["raise", "skip"]
    error_budget: float | Fraction | None
    replace: bool
    stats: bool
    _state: LoaderState
    _tuning_state: TuningState | None

    @property
    def is_tuned(self) -> bool:
        """Whether the number of workers changes while they run: ``num_workers="auto"``, where it
        shows in nothing but the speed. An iterable dataset divides itself among its workers, and
        with ``rng="worker"`` each has a stream of its own, so there the first number stays; so it
        does with ``isolation="process"``, where this process has no workers to add to.
        """
        is_fixed = (
            isinstance(self.dataset, IterableDataset)
            or self.rng == "worker"
            or self.isolation == "process"
        )
        return isinstance(self.num_workers, AutoWorkers) and not is_fixed and self.stats

    def tuning_state(self) -> TuningState:
        """What tuning has found so far, over all epochs. Only where ``is_tuned``."""
        if self._tuning_state is None:
            assert isinstance(self.num_workers, AutoWorkers), "guaranteed by is_tuned"
            self._tuning_state = TuningState(self.num_workers.tuning, "DataLoader")
        return self._tuning_state
