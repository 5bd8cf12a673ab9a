"""The position in an epoch as a state for a checkpoint, and what the order follows from in which
that is one.

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

from torch.utils.data import (
    DistributedSampler as TorchDistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from ..sampling.sampler_chain import divides_itself, length_of, nested_samplers, num_ranks
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


# A state is a position in an order. In another order it means nothing, and nobody would notice: so
# what the order follows from is saved beside it, and compared when the state is resumed.

_OF_ORDER = ("length", "shuffle", "sampler_seed")


def made_by(loader: Any) -> dict[str, Any]:
    """Return what the order of a loader follows from, as numbers; None = unknown."""
    *_, innermost = nested_samplers(loader._index_sampler)
    is_iterable = isinstance(loader.dataset, IterableDataset)
    shuffle = seed = ranks = None
    if isinstance(innermost, RandomSampler | SequentialSampler):
        shuffle = isinstance(innermost, RandomSampler)
    elif isinstance(innermost, TorchDistributedSampler):
        shuffle = bool(innermost.shuffle)
        seed = int(innermost.seed) if shuffle else None
    if divides_itself(loader.dataset):  # it may have been given
        ranks = loader.dataset._own_rank.num_replicas
    return {
        "length": None if is_iterable else length_of(loader.dataset),
        "shuffle": shuffle,
        "sampler_seed": seed,
        "batch_size": loader.batch_size,
        "ranks": ranks or num_ranks(loader._index_sampler),
    }


def check_made_by(resume: ResumeState, here: Mapping[str, Any]) -> None:
    """Compare the loader of a state within an epoch with the one ``here``.

    Raises: ValueError: the order cannot be the one that was saved.
    """
    saved = resume.made_by
    compared = {name for name in _OF_ORDER if None not in (saved.get(name), here[name])}
    compared |= {"batch_size", "ranks"} if resume.ahead else set()  # numbers of batches
    told = [
        f"{name} {here[name]!r}, was {saved[name]!r}"
        for name in here
        if name in compared and saved[name] != here[name]
    ]
    if told:
        raise ValueError(
            f"load_state_dict: made_by: the state is of another loader: {', '.join(told)}. Its "
            "position means nothing in another order: samples would be lost, or come twice. Make "
            "the loader as it was then, or begin a new epoch without the state."
        )
