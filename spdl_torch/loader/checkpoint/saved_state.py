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
from .epoch import BaseSeed, SamplerState
from .user_state import WorkerState

_VERSION = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumeState:
    """The checked contents of a state: its fields are those of the state, in which tuples are
    lists, and ``drawn`` and ``base`` are taken apart."""

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
    drawn: SamplerState = field(default_factory=SamplerState)
    order: int | None = None
    """The checksum of the last indices of those samples, by which the order is known again when it
    is drawn; None = nothing is known of them. With a sampler's state: of the types of the indices
    that are pending."""
    generators: tuple[str, ...] = ()
    """The generators' states when the epoch began, or at its end; torch's global one is first."""
    base: BaseSeed = field(default_factory=BaseSeed)
    """That of this epoch or, at its end, of the next one."""
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
        names = [each.name for each in fields(cls) if each.name not in _GROUPS]
        names += [name for kind in _GROUPS.values() for name in kind._fields]
        values = checked_values(names, state, _VERSION, "DataLoader")
        values["workers"] = [WorkerState(**worker) for worker in values["workers"]]
        for name in _LISTS:
            values[name] = tuple(values[name])
        for group, kind in _GROUPS.items():
            values[group] = kind(*map(values.pop, kind._fields))
        return cls(**values)

    def as_dict(self) -> dict[str, Any]:
        """Return the state as numbers, text, lists and dicts alone, apart from the own states of
        samplers and datasets.
        """
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        for group in _GROUPS:
            values |= values.pop(group)._asdict()
        for name in _LISTS:
            values[name] = list(values[name])
        values["workers"] = [
            {name: getattr(worker, name) for name in _WORKER_FIELDS} for worker in self.workers
        ]
        return copy.deepcopy({**values, "version": _VERSION})


_GROUPS: dict[str, Any] = {"drawn": SamplerState, "base": BaseSeed}
"""The fields whose own fields stand in a state beside the others."""
_LISTS = ("ahead", "pending", "generators", "workers")
_WORKER_FIELDS = ("num_items", "ended", "state", "of_dataset", "num_after")
