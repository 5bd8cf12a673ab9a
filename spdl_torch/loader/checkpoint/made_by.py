"""What the order of a loader that a state was saved with follows from.

A state is a position in an order. In another order it means nothing, and nobody would notice: so
what the order follows from is saved beside it, and compared when the state is resumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch.utils.data import (
    DistributedSampler as TorchDistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from ...handlers import unless_of_handler
from ..sampling.sampler_chain import divides_itself, nested_samplers, num_ranks

if TYPE_CHECKING:
    from .saved_state import ResumeState


def made_by(loader: Any) -> dict[str, Any]:
    """Return what the order of a loader follows from, as numbers; None = unknown."""
    *_, innermost = nested_samplers(loader._index_sampler)
    is_iterable = isinstance(loader.dataset, IterableDataset)
    return {
        "length": None if is_iterable else length_of(loader.dataset),
        "shuffle": _shuffle(innermost),
        "sampler_seed": _seed(innermost),
        "batch_size": loader.batch_size,
        "ranks": _ranks(loader),
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


def length_of(dataset: Any) -> int | None:
    """Return the dataset's length; None = it has none."""
    try:
        return len(dataset)
    except unless_of_handler(Exception):  # the user's: who wants to know gets the error
        return None


_OF_ORDER = ("length", "shuffle", "sampler_seed")


def _ranks(loader: Any) -> int:
    """Return the number of ranks, which a dataset that divides itself may have been given."""
    own = loader.dataset._own_rank.num_replicas if divides_itself(loader.dataset) else None
    return own or num_ranks(loader._index_sampler)


def _shuffle(sampler: Any) -> bool | None:
    """Return whether a sampler shuffles; None = unknown."""
    if isinstance(sampler, RandomSampler | SequentialSampler):
        return isinstance(sampler, RandomSampler)
    return bool(sampler.shuffle) if isinstance(sampler, TorchDistributedSampler) else None


def _seed(sampler: Any) -> int | None:
    """Return the seed from which a sampler's order follows; None = not from one."""
    is_seeded = isinstance(sampler, TorchDistributedSampler) and sampler.shuffle
    return int(sampler.seed) if is_seeded else None
