"""The part of a ``DataLoader`` that its iterators use."""

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
    """torch's loader with the options that this package adds, and its state between epochs."""

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
        """Whether ``num_workers="auto"`` may change the number of workers while they run.

        It may only where that affects nothing but the speed. The first number stays for an
        iterable dataset, which divides itself among its workers; with ``rng="worker"``, where each
        worker has its own random stream; and with ``isolation="process"``, where this process has
        no workers to add to.
        """
        is_fixed = (
            isinstance(self.dataset, IterableDataset)
            or self.rng == "worker"
            or self.isolation == "process"
        )
        return isinstance(self.num_workers, AutoWorkers) and not is_fixed and self.stats

    def tuning_state(self) -> TuningState:
        """Return what tuning has found so far, over all epochs. Requires ``is_tuned``."""
        if self._tuning_state is None:
            assert isinstance(self.num_workers, AutoWorkers), "guaranteed by is_tuned"
            self._tuning_state = TuningState(self.num_workers.tuning, "DataLoader")
        return self._tuning_state
