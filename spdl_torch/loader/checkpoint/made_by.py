"""A short description of the loader, dataset and sampler that a state was saved with.

A state is a position in an order. In another order it means nothing, and nobody would notice: so
what the order follows from is saved beside it, and compared when the state is resumed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch.utils.data import (
    BatchSampler,
    DistributedSampler as TorchDistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from ...handlers import unless_of_handler
from ..sampling.sampler_chain import divides_itself, nested_samplers, num_ranks
from ..state_fields import AT_LEAST_ONE, Field, is_flag, list_of

if TYPE_CHECKING:
    from .saved_state import ResumeState


def made_by(loader: Any) -> dict[str, Any]:
    """Return what identifies a loader, as numbers and text; None = unknown."""
    samplers = list(nested_samplers(loader._index_sampler))
    is_iterable = isinstance(loader.dataset, IterableDataset)
    return {
        "dataset": type(loader.dataset).__name__,
        "length": None if is_iterable else length_of(loader.dataset),
        # Without batches, or with our own size of them, the same samplers give the same order.
        "samplers": []
        if is_iterable
        else [type(each).__name__ for each in samplers if type(each) is not BatchSampler],
        "shuffle": _shuffle(samplers[-1]),
        "sampler_seed": _seed(samplers[-1]),
        "seed": loader.seed,
        "batch_size": loader.batch_size,
        "ranks": _ranks(loader),
        "rng": loader.rng,
        "persistent_workers": _persistence(loader, samplers[-1]),
    }


def check_made_by(resume: ResumeState, here: Mapping[str, Any]) -> str:
    """Compare the loader of a state with the one ``here``, and return what may be wrong; "" =
    nothing.

    Raises: ValueError: within an epoch, the order cannot be the one that was saved.
    """
    saved = resume.made_by
    differing = [name for name in here if name in saved and saved[name] != here[name]]
    wrong, doubtful = set(), {"dataset", "samplers", "seed", "rng", *_OF_ORDER}
    if None not in (saved.get("persistent_workers"), here["persistent_workers"]):
        doubtful |= {"persistent_workers"}
    if not resume.finished:
        wrong = {name for name in _OF_ORDER if None not in (saved.get(name), here[name])}
        wrong |= {"batch_size", "ranks"} if resume.ahead else set()  # numbers of batches
        doubtful |= {"ranks"} if resume.workers else set()  # which divide the dataset
    told = ", ".join(_told(name, saved, here) for name in differing if name in wrong)
    if told:
        raise ValueError(
            f"load_state_dict: made_by: the state is of another loader: {told}. Its position means "
            "nothing in another order: samples would be lost, or come twice. Make the loader as it "
            "was then, or begin a new epoch without the state."
        )
    return ", ".join(_told(name, saved, here) for name in differing if name in doubtful)


def length_of(dataset: Any) -> int | None:
    """Return the dataset's length; None = it has none."""
    try:
        return len(dataset)
    except unless_of_handler(Exception):  # the user's: who wants to know gets the error
        return None


def pass_made_by(source: Any, stages: Iterable[str]) -> dict[str, Any]:
    """Return what identifies the passes of a pipeline."""
    return {
        "source": type(source).__name__,
        "length": length_of(source),
        # Ranks of another number have batches of another size, as aggregate(6) says.
        "stages": [name.partition("(")[0] for name in stages],
    }


def doubts_about_pass(saved: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """Return what may be wrong with a pipeline ``here`` for a state that ``saved`` says the origin
    of; "" = nothing. A source that has grown since may be right.
    """
    return ", ".join(
        _told(name, saved, here) for name in here if name in saved and saved[name] != here[name]
    )


def told_doubts(owner: str, doubts: str) -> str:
    """Return the warning about a state that is resumed in spite of doubts."""
    return (
        f"{owner}.load_state_dict: the state is of another one: {doubts}. This one goes on where "
        "the state says, but what comes may not be what would have come. Make it as it was then; "
        "or take no notice, if this is meant."
    )


_OF_ORDER = ("length", "shuffle", "sampler_seed")


def _told(name: str, saved: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    return f"{name} {here[name]!r}, was {saved[name]!r}"


def _ranks(loader: Any) -> int:
    """Return the number of ranks, which a dataset that divides itself may have been given."""
    own = loader.dataset._own_rank.num_replicas if divides_itself(loader.dataset) else None
    return own or num_ranks(loader._index_sampler)


def _shuffle(sampler: Any) -> bool | None:
    """Return whether a sampler shuffles; None = unknown."""
    if isinstance(sampler, RandomSampler | SequentialSampler):
        return isinstance(sampler, RandomSampler)
    return bool(sampler.shuffle) if isinstance(sampler, TorchDistributedSampler) else None


def _persistence(loader: Any, sampler: Any) -> bool | None:
    """Return whether the epochs to come draw no base seeds, from the generator of the order; None =
    neither order nor random streams follow from that."""
    is_seeded = _shuffle(sampler) is False or _seed(sampler) is not None
    return None if is_seeded and loader.seed is not None else bool(loader.persistent_workers)


def _seed(sampler: Any) -> int | None:
    """Return the seed from which a sampler's order follows; None = not from one."""
    is_seeded = isinstance(sampler, TorchDistributedSampler) and sampler.shuffle
    return int(sampler.seed) if is_seeded else None


def _is_text(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _is_number(value: Any) -> bool:
    return value is None or type(value) is int


_NUMBER = Field("a whole number or null", _is_number)
_FLAG = Field("true, false or null", lambda value: value is None or is_flag(value))
_TEXT = Field("text or null", _is_text)
_TEXTS = list_of("text", _is_text)
PIPELINE_FIELDS = {"source": _TEXT, "length": _NUMBER, "stages": _TEXTS}
"""The fields of ``made_by`` in a pipeline's state."""
FIELDS = {
    "dataset": _TEXT,
    "length": _NUMBER,
    "samplers": _TEXTS,
    "shuffle": _FLAG,
    "sampler_seed": _NUMBER,
    "seed": _NUMBER,
    "batch_size": _NUMBER,
    "ranks": AT_LEAST_ONE,
    "rng": _TEXT,
    "persistent_workers": _FLAG,
}
"""The fields of ``made_by`` in a state."""
