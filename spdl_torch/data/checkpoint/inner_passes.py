"""The passes of the pipeline datasets inside a dataset, which go on from epoch to epoch.

A mixture or torch's ``ChainDataset`` keeps no state, but the order of its items follows from the
passes that the ``PipelineDataset``s in it begin. So a loader's state has their numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

from ...objects.datasets import all_datasets
from .user_state import give_state, keeps_state

if TYPE_CHECKING:
    from collections.abc import Iterator


class Passes(Protocol):
    """A dataset of ours that begins the next pass when its iterator is first asked for an item: a
    ``PipelineDataset``, whose module is not imported here, as it brings the engine."""

    def _next_pass_state(self) -> dict[str, Any]:
        """Return the state before the first item of the next pass."""

    def _begun_pass(self) -> Iterator[Any]:
        """Begin the next pass, and return its items."""

    def _want_states(self) -> None:
        """Collect states from now on."""

    def _named_epoch(self) -> int | None:
        """Return the epoch that ``set_epoch`` has named since; None = none."""

    def _forget_named_epoch(self) -> None:
        """Let a state that is loaded later decide on the epoch."""

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next pass."""


def has_passes(dataset: object) -> TypeGuard[Passes]:
    """Ask the class: an object that answers to any attribute name would seem to be one."""
    return hasattr(type(dataset), "_begun_pass")


def state_at_beginning(dataset: Any) -> Any:
    """Return the state from which a dataset makes the passes that it is about to begin, for a
    loader that counts the items since; None = it has none."""
    return dataset._next_pass_state() if has_passes(dataset) else pass_states(dataset)


def pass_states(dataset: Any) -> list[dict[str, Any]] | None:
    """Return the states from which those inside the dataset would begin their next passes; None =
    there are none inside."""
    return [each._next_pass_state() for each in _inside(dataset)] or None


def give_dataset_state(dataset: Any, states: Any, field: str) -> None:
    """Give the dataset its own state or, if it keeps none, those inside the states of their passes.
    ``field``: the name of ``states`` in the loader's state.

    Raises: ValueError: the dataset keeps no state, and has others inside, or none.
    """
    inside = _inside(dataset)
    if not inside:
        give_state(dataset, states, field)
        return
    if len(states) != len(inside):
        raise ValueError(
            f"load_state_dict: {field} holds the states of {len(states)} PipelineDataset(s), and "
            f"{type(dataset).__name__} here has {len(inside)} inside. Load it into a loader that "
            "is made as it was then."
        )
    for each, state in zip(inside, states, strict=True):
        give_state(each, state, field)


def give_state_between_epochs(dataset: Any, states: Any, field: str) -> None:
    """Give a dataset its state, as ``give_dataset_state``, before the first item of an epoch. An
    epoch that was named after the loader's ``load_state_dict`` counts."""
    named = [(each, each._named_epoch()) for each in _all_passes(dataset)]
    give_dataset_state(dataset, states, field)
    for each, epoch in named:
        if epoch is not None:
            each.set_epoch(epoch)


def want_states(dataset: Any) -> None:
    """Let a dataset, or those inside it, collect states from now on. So do later copies."""
    for each in _all_passes(dataset):
        each._want_states()


def forget_named_epochs(dataset: Any) -> None:
    """Let the state that a loader is about to load decide on the epochs named so far."""
    for each in _all_passes(dataset):
        each._forget_named_epoch()


def _all_passes(dataset: Any) -> list[Passes]:
    return [dataset] if has_passes(dataset) else _inside(dataset)


def _inside(dataset: Any) -> list[Any]:
    """Return the pipeline datasets inside a dataset, each once; [] if it keeps a state itself."""
    if keeps_state(dataset):
        return []
    return list({id(each): each for each in all_datasets(dataset) if has_passes(each)}.values())
