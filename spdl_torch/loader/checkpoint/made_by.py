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


def length_of(dataset: Any) -> int | None:
    """Return the dataset's length; None = it has none."""
    try:
        return len(dataset)
    except unless_of_handler(Exception):  # the user's: who wants to know gets the error
        return None


_OF_ORDER = ("length", "shuffle", "sampler_seed")
