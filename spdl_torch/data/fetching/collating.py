"""From samples to their batch: ``collate_fn``, its random stream, its time and its errors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.data import default_collate

from ...engine.failures import describe
from ..error_notes import cause_of, noted_call
from . import stacking
from .odd_sample import odd_sample
from .timing import timed

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...engine.hooks.task_hooks import TaskCell
    from .batch import Batch
    from .stacking import Memory


class Collating:
    """Calls ``collate_fn`` for one worker, and counts the time in a cell (None: off).

    batch: the batch that the worker is making, for its random streams.
    into: what collates in its place, with the same result.
    memory: large tensors of a batch are made there.
    describe: names batch ``number`` of ``index`` in errors.
    """

    def __init__(
        self,
        collate_fn: Callable[[Any], Any],
        batch: Batch,
        cell: TaskCell | None,
        *,
        into: Callable[[Any], Any] | None,
        memory: Memory | None,
        describe: Callable[[int, Any], str],
    ) -> None:
        self._is_torchs = collate_fn is default_collate
        # All large tensors of torch's batches go to the device. Another function could keep views
        # of the memory, from which the loop might begin copies that nobody knows of.
        self.memory = memory if stacking.is_torchs_collate(collate_fn) else None
        if self.memory is not None:
            into = stacking.collate_into(self.memory)
        self._collate = into or collate_fn
        self._batch = batch
        self._cell = cell
        self._describe = describe
        self.has_begun = False
        """Whether the worker's batch is being collated; its maker resets this."""

    def collate(self, samples: Any, index: Any, number: int) -> Any:
        """Collate the samples into batch ``number``, for which the sampler gave ``index``.

        Raises: what ``collate_fn`` raises, with a note that names the batch.
        """
        if self.memory is None:
            return self._collated(samples, index, number)
        try:
            return self._collated(samples, index, number)
        finally:
            self.memory.end()

    def _collated(self, samples: Any, index: Any, number: int) -> Any:
        self.has_begun = True
        if self._batch.streams is not None:
            self._batch.streams.at_collate()
        if self._is_torchs:
            made = getattr(samples, "collated", None)
            if made is not None:
                return made  # the dataset has already written its samples into one batch
        try:
            return timed(self._cell, self._collate, samples)
        except BaseException as error:
            given = f"{self._describe(number, index)}, given {describe(samples)}"
            if odd := odd_sample(samples):
                given = f"{given}; {odd}"
            raise noted_call(error, "collate_fn", "in collate_fn", given) from cause_of(error)
