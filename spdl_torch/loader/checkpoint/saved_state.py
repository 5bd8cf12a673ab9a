"""The position in an epoch as a state for a checkpoint.

A state says what the trainer has received, and ignores what was prefetched beyond that. It holds
only numbers and text, so it survives JSON and ``torch.load(weights_only=True)``.

Most epochs end without one: this is imported when a state is taken or given.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from ..rng.keys import epoch_seed
from ..state_fields import Field, check_fields, check_version, is_flag, is_whole_number
from .epoch_start import BaseSeed, SamplerState
from .made_by import FIELDS as MADE_BY_FIELDS
from .user_state import WorkerState

if TYPE_CHECKING:
    from collections.abc import Mapping

_VERSION = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumeState:
    """The checked contents of a state."""

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
    sampler: SamplerState = field(default_factory=SamplerState)
    order: int | None = None
    """The checksum of the last indices of those samples, by which the order is known again when it
    is drawn; None = nothing is known of them."""
    generators: tuple[str, ...] = ()
    """The generators' states when the epoch began, or at its end; torch's global one is first."""
    base: BaseSeed = field(default_factory=BaseSeed)
    """That of the epoch to begin. With ``persistent_workers`` only the first epoch draws one."""
    workers: tuple[WorkerState, ...] = ()
    next_worker: int = 0
    dataset: Any = None
    """The state of a map-style dataset that has ``state_dict()``, with ``num_workers=0``."""
    made_by: dict[str, Any] = field(default_factory=dict)
    """The loader, dataset and sampler that the state is of; {} = not known."""

    @classmethod
    def checked(cls, state: Mapping[str, Any]) -> ResumeState:
        """Check a state. Raises: ValueError: not a loader's state, or of another format."""
        check_version(state, _VERSION, "DataLoader")
        values = copy.deepcopy({**state})
        values.pop("_iterator_finished", None)  # Accelerate puts it into every loader's state
        del values["version"]
        check_fields(values, _FIELDS, tuple(_FIELDS), "DataLoader")
        check_fields(values["made_by"], MADE_BY_FIELDS, (), "DataLoader", "made_by.")
        workers = values["workers"]
        for number, worker in enumerate(workers):
            where = f"workers[{number}]."
            check_fields(worker, _WORKER_FIELDS, tuple(_WORKER_FIELDS), "DataLoader", where)
            if worker["num_after"] > worker["num_items"]:
                raise ValueError(
                    f"load_state_dict: workers[{number}].num_after must be at most num_items."
                )
        if values["next_worker"] >= max(1, len(workers)):
            raise ValueError(
                f"load_state_dict: next_worker must be below the number of workers, "
                f"{len(workers)}, got {values['next_worker']}."
            )
        for name in _LISTS:
            values[name] = tuple(values.get(name, ()))
        values["workers"] = tuple(WorkerState(**worker) for worker in workers)
        for name, (part, names) in _PARTS.items():
            given = {own: values.pop(named) for own, named in names.items() if named in values}
            values[name] = part(**given)
        return cls(**values)

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
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, (_, names) in _PARTS.items():
            part = values.pop(name)
            values |= {named: getattr(part, own) for own, named in names.items()}
        values["workers"] = [
            {name: getattr(worker, name) for name in _WORKER_FIELDS} for worker in self.workers
        ]
        for name in _LISTS:
            values[name] = list(values[name])
        return copy.deepcopy({**{name: values[name] for name in _FIELDS}, "version": _VERSION})


def _is_sequence(value: Any) -> bool:
    return isinstance(value, list | tuple)


_NUMBER = Field("a whole number >= 0 of 64 bits", is_whole_number)
_OPTIONAL = Field(
    "a whole number >= 0 or null", lambda value: value is None or is_whole_number(value)
)
_FLAG = Field("true or false", is_flag)
_ANYTHING = Field("anything", lambda _: True)

_FIELDS = {
    "epoch": Field("a whole number >= -1", lambda value: is_whole_number(value, -1)),
    "epoch_seed": _NUMBER,
    "finished": _FLAG,
    "num_samples": _NUMBER,
    "ahead": Field(
        "a list of whole numbers >= 0",
        lambda value: _is_sequence(value) and all(is_whole_number(each) for each in value),
    ),
    "sampler_epoch": _OPTIONAL,
    "sampler": _ANYTHING,
    "pending": Field("a list of indices", _is_sequence),
    "sampler_left": _OPTIONAL,
    "order": _OPTIONAL,
    "generators": Field(
        "a list of text",
        lambda value: _is_sequence(value) and all(isinstance(each, str) for each in value),
    ),
    "drew_base_seed": _FLAG,
    "base_seed": _NUMBER,
    "num_epochs": _NUMBER,
    "workers": Field(
        "a list of dicts",
        lambda value: _is_sequence(value) and all(isinstance(each, dict) for each in value),
    ),
    "next_worker": _NUMBER,
    "dataset": _ANYTHING,
    "made_by": Field("a dict", lambda value: isinstance(value, dict)),
}
_LISTS = ("ahead", "generators", "pending")
_PARTS: dict[str, tuple[type, dict[str, str]]] = {
    "sampler": (
        SamplerState,
        {"state": "sampler", "pending": "pending", "left": "sampler_left"},
    ),
    "base": (
        BaseSeed,
        {"value": "base_seed", "num_epochs": "num_epochs", "is_new": "drew_base_seed"},
    ),
}
"""What several fields of a state say together, and the names that they have there."""
_WORKER_FIELDS = {
    "num_items": _NUMBER,
    "ended": _FLAG,
    "state": _ANYTHING,
    "of_dataset": _FLAG,
    "num_after": _NUMBER,
}
