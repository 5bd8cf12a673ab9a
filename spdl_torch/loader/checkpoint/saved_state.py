"""The position in an epoch as a state for a checkpoint.

A state says what the trainer has received, and ignores what was prefetched beyond that. It holds
only numbers and text, so it survives JSON and ``torch.load(weights_only=True)``.

Most epochs end without one: this is imported when a state is taken or given.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ..rng.keys import epoch_seed
from ..state_fields import (
    ANYTHING,
    DICT,
    FLAG,
    NUMBER,
    OPTIONAL_NUMBER,
    Field,
    check_fields,
    checked_values,
    is_whole_number,
    list_of,
    saved,
)
from .epoch import BaseSeed
from .made_by import FIELDS as MADE_BY_FIELDS
from .user_state import WorkerState

_VERSION = 4

_TEXTS = list_of("text", lambda each: isinstance(each, str))


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumeState:
    """The checked contents of a state: its fields are those of the state, in which tuples are
    lists."""

    epoch: int = saved(Field("a whole number >= -1", lambda value: is_whole_number(value, -1)))
    """The number of epochs begun before this one."""
    epoch_seed: int = saved(NUMBER)
    """The seed of the random streams."""
    finished: bool = saved(FLAG)
    """Whether the loop saw the end: the next epoch then starts from the beginning."""
    num_samples: int = saved(NUMBER, default=0)
    """The number of samples handed out, on all ranks together."""
    ahead: tuple[int, ...] = saved(list_of("whole numbers >= 0", is_whole_number), default=())
    """The batches after those samples that were handed out before their turn
    (``in_order=False``)."""
    sampler_epoch: int | None = saved(OPTIONAL_NUMBER, default=None)
    sampler: Any = saved(ANYTHING, default=None)
    """The state of a sampler that keeps one, after ``pending``; None = it keeps none."""
    pending: tuple[Any, ...] = saved(list_of("indices"), default=())
    """The indices that were drawn from that sampler and not handed out."""
    sampler_left: int | None = saved(OPTIONAL_NUMBER, default=None)
    """The number of indices that it gives after those in this epoch; None = unknown."""
    order: int | None = saved(OPTIONAL_NUMBER, default=None)
    """The checksum of the last indices of those samples, by which the order is known again when it
    is drawn; None = nothing is known of them."""
    generators: tuple[str, ...] = saved(_TEXTS, default=())
    """The generators' states when the epoch began, or at its end; torch's global one is first."""
    drew_base_seed: bool = saved(FLAG, default=True)
    base_seed: int = saved(NUMBER, default=0)
    num_epochs: int = saved(NUMBER, default=0)
    workers: tuple[WorkerState, ...] = saved(list_of("dicts", DICT.fits), default=())
    next_worker: int = saved(NUMBER, default=0)
    dataset: Any = saved(ANYTHING, default=None)
    """The state of a map-style dataset that has ``state_dict()``, with ``num_workers=0``; of
    a ``PipelineDataset`` that before the pass that begins or is next, where ``workers`` lack it."""
    made_by: dict[str, Any] = saved(DICT, default_factory=dict)
    """The loader, dataset and sampler that the state is of; {} = not known."""

    @classmethod
    def checked(cls, state: Mapping[str, Any]) -> ResumeState:
        """Check a state. Raises: ValueError: not a loader's state, or of another format."""
        if isinstance(state, dict) and "_iterator_finished" in state:
            state = {**state}
            del state["_iterator_finished"]  # Accelerate puts it into every loader's state
        values = checked_values(cls, state, _VERSION, "DataLoader", MADE_BY_FIELDS)
        workers = values["workers"]
        for number, worker in enumerate(workers):
            where = f"workers[{number}]."
            check_fields(worker, _WORKER_FIELDS, _WORKER_FIELDS, "DataLoader", where)
            if worker["num_after"] > worker["num_items"]:
                raise ValueError(
                    f"load_state_dict: workers[{number}].num_after must be at most num_items."
                )
        if values["next_worker"] >= max(1, len(workers)):
            raise ValueError(
                f"load_state_dict: next_worker must be below the number of workers, "
                f"{len(workers)}, got {values['next_worker']}."
            )
        values["workers"] = [WorkerState(**worker) for worker in workers]
        for name in _LISTS:
            values[name] = tuple(values[name])
        return cls(**values)

    @property
    def base(self) -> BaseSeed:
        """That of the epoch to begin. Of persistent workers' epochs only the first draws one."""
        return BaseSeed(self.base_seed, self.num_epochs, self.drew_base_seed)

    @property
    def has_streams_anew(self) -> bool:
        """Whether the workers' own streams (``rng="worker"``) are others for the rest of the epoch.

        Nobody has the workers' generators. Where a worker makes all its items again, it draws
        their numbers again, too.
        """
        return any(self._place)

    def seed_of_rest(self) -> int:
        """Return the seed of the workers' own streams for the rest of the epoch: it belongs to this
        place alone, so the numbers of the epoch's beginning do not come again."""
        seed = self.epoch_seed
        if self.has_streams_anew:
            for number in self._place:  # two or more: an epoch's seed is mixed with one, its number
                seed = epoch_seed(seed, number)
        return seed

    @property
    def _place(self) -> tuple[int, ...]:
        kept = [w.num_items - w.num_after for w in self.workers if w.state is not None]
        return (self.num_samples, len(self.ahead), *kept)

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
_WORKER_FIELDS = {
    "num_items": NUMBER,
    "ended": FLAG,
    "state": ANYTHING,
    "of_dataset": FLAG,
    "num_after": NUMBER,
}
