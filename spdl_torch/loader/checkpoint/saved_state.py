"""The position in an epoch as a state for a checkpoint.

A state says what the trainer has received, and ignores what was prefetched beyond that. It holds
only numbers and text, so it survives JSON and ``torch.load(weights_only=True)``, apart from what
samplers with a state give: indices of other kinds, and the state.

Most epochs end without one: this is imported when a state is taken or given.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ..state_fields import checked_values
from .epoch import BaseSeed
from .user_state import WorkerState

_VERSION = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumeState:
    """The checked contents of a state: its fields are those of the state, in which tuples are
    lists."""

    epoch: int
    """The number of epochs begun before this one."""
    epoch_seed: int
    """The seed of the random streams."""
    finished: bool
    """Whether the loop saw the end: the next epoch then starts from the beginning."""
    num_samples: int = 0
    """The number of samples handed out, on all ranks together."""
    ahead: tuple[int, ...] = ()
    """The batches after those samples that were handed out before their turn
    (``in_order=False``)."""
    sampler_epoch: int | None = None
    sampler: Any = None
    """The state of a sampler that keeps one, after ``pending``; None = it keeps none."""
    pending: tuple[Any, ...] = ()
    """The indices that were drawn from that sampler and not handed out."""
    sampler_left: int | None = None
    """The number of indices that it gives after those in this epoch; None = unknown."""
    order: int | None = None
    """The checksum of the last indices of those samples, by which the order is known again when it
    is drawn; None = nothing is known of them. With ``sampler``: of the types of ``pending``."""
    generators: tuple[str, ...] = ()
    """The generators' states when the epoch began, or at its end; torch's global one is first."""
    drew_base_seed: bool = True
    base_seed: int = 0
    num_epochs: int = 0
    workers: tuple[WorkerState, ...] = ()
    next_worker: int = 0
    dataset: Any = None
    """The state of a map-style dataset that has ``state_dict()``, with ``num_workers=0``; of
    a ``PipelineDataset`` that before the pass that begins or is next, where ``workers`` lack it."""
    made_by: dict[str, Any] = field(default_factory=dict)
    """What the order follows from; {} = not known."""

    @classmethod
    def checked(cls, state: Mapping[str, Any]) -> ResumeState:
        """Check a state. Raises: ValueError: not a loader's state, or of another format."""
        if isinstance(state, dict) and "_iterator_finished" in state:
            state = {**state}
            del state["_iterator_finished"]  # Accelerate puts it into every loader's state
        values = checked_values(cls, state, _VERSION, "DataLoader")
        values["workers"] = [WorkerState(**worker) for worker in values["workers"]]
        for name in _LISTS:
            values[name] = tuple(values[name])
        return cls(**values)

    @property
    def base(self) -> BaseSeed:
        """That of the epoch to begin. Of persistent workers' epochs only the first draws one."""
        return BaseSeed(self.base_seed, self.num_epochs, self.drew_base_seed)

    def as_dict(self) -> dict[str, Any]:
        """Return the state as numbers, text, lists and dicts alone, apart from the own states of
        samplers and datasets.
        """
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        for name in _LISTS:
            values[name] = list(values[name])
        values["workers"] = [
            {name: getattr(worker, name) for name in _WORKER_FIELDS} for worker in self.workers
        ]
        return copy.deepcopy({**values, "version": _VERSION})


_LISTS = ("ahead", "pending", "generators", "workers")
_WORKER_FIELDS = ("num_items", "ended", "state", "of_dataset", "num_after")
