"""The passes of a ``PipelineDataset`` in a loader, which go on from epoch to epoch.

A loader's state has the number of the next one, before the first item and after the last.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

from ...objects.datasets import all_datasets
from .user_state import give_state, keeps_state

if TYPE_CHECKING:
    from .saved_state import ResumeState


class Passes(Protocol):
    """A ``PipelineDataset``, whose module is not imported here, as it brings the engine."""

    def _next_pass_state(self) -> dict[str, Any]:
        """Return the state before the first item of the next pass."""

    def _want_states(self) -> None:
        """Collect states from now on."""

    def _pass_over(self, num_passes: int) -> None:
        """Let the next pass be that many later."""

    def _named_epoch(self) -> int | None:
        """Return the epoch that ``set_epoch`` has named since; None = none."""

    def _forget_named_epoch(self) -> None:
        """Let a state that is loaded later decide on the epoch."""

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next pass."""


def has_passes(dataset: object) -> TypeGuard[Passes]:
    """Ask the class: an object that answers to any attribute name would seem to be one."""
    return hasattr(type(dataset), "_next_pass_state")


def pass_over(dataset: object, num_epochs: int) -> None:
    """Let a worker's copy, which has begun no pass, begin with the pass that comes after so many
    epochs: without workers the loader's dataset has had a pass in each. An epoch that was named
    counts."""
    if num_epochs and has_passes(dataset) and dataset._named_epoch() is None:
        dataset._pass_over(num_epochs)


def give_state_between_epochs(dataset: Any, state: Any, field: str) -> None:
    """Give a dataset its state before the first item of an epoch; ``field``: its name in the
    loader's state. An epoch that was named after the loader's ``load_state_dict`` counts.
    """
    epoch = dataset._named_epoch() if has_passes(dataset) else None
    give_state(dataset, state, field)
    if epoch is not None:
        dataset.set_epoch(epoch)


def check_no_passes_inside(dataset: Any, resume: ResumeState) -> None:
    """Check that the items which a state within a later epoch counts come again: not where they are
    of a later pass of a ``PipelineDataset`` inside, of which no state knows the number.

    Raises: ValueError: they do not.
    """
    is_counted = any(each.num_items and each.state is None for each in resume.workers)
    if not (resume.epoch and is_counted) or keeps_state(dataset):
        return
    inside = [each for each in all_datasets(dataset) if has_passes(each)]
    if all(each._named_epoch() is not None for each in inside):
        return
    kind = type(dataset).__name__
    raise ValueError(
        f"load_state_dict: the state is of epoch {resume.epoch}, within which {kind} has given "
        f"items of a later pass of the PipelineDataset inside, but no state has that pass's "
        f"number: other items would be skipped. Make one PipelineDataset of all sources, give "
        f"{kind} state_dict() and load_state_dict(state), or call set_epoch(epoch) of each "
        "PipelineDataset inside between load_state_dict() and iter()."
    )
