"""The passes of a ``PipelineDataset`` in a loader, which go on from epoch to epoch.

A loader's state has the number of the one that it is within, or of the next one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

from ...objects.datasets import all_datasets
from .user_state import give_state, keeps_state

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .saved_state import ResumeState


class Passes(Protocol):
    """A ``PipelineDataset``, whose module is not imported here, as it brings the engine."""

    def _next_pass_state(self) -> dict[str, Any]:
        """Return the state before the first item of the next pass."""

    def _begun_pass(self) -> Iterator[Any]:
        """Return an iterator whose pass has begun, though no thread has."""

    def _want_states(self) -> None:
        """Collect states from now on."""

    def _move_to_pass(self, epoch: int) -> None:
        """Let the next pass be that one, unless one was named or a state says which it is."""

    def _hand_out_pass(self) -> int | None:
        """Count the next pass, which copies begin, and return its number; None = they know it."""

    def _named_epoch(self) -> int | None:
        """Return the epoch that ``set_epoch`` has named since; None = none."""

    def _forget_named_epoch(self) -> None:
        """Let a state that is loaded later decide on the epoch."""

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next pass."""


def has_passes(dataset: object) -> TypeGuard[Passes]:
    """Ask the class: an object that answers to any attribute name would seem to be one."""
    return hasattr(type(dataset), "_next_pass_state")


def begun(dataset: Any) -> Any:
    """Return ``iter(dataset)``; of passes one that has begun, so that the next one is another,
    unless a class of the user's has an ``__iter__`` of its own."""
    for each in type(dataset).__mro__:
        if "__iter__" in vars(each):
            return dataset._begun_pass() if "_begun_pass" in vars(each) else iter(dataset)
    return iter(dataset)


def pass_of_workers(dataset: object, resume: ResumeState | None, num_workers: int) -> int | None:
    """Return the number of the pass with which the workers' copies of a loader's dataset begin an
    epoch, and count it there; None = there are none, or they know it.

    Without workers the dataset itself counts, and is told where a state lacks the number.
    """
    if not has_passes(dataset):
        return None
    if resume is not None:
        dataset._move_to_pass(_pass_of(resume, is_begun=num_workers > 0))
    return dataset._hand_out_pass() if num_workers else None


def left_for_another_pass(dataset: object, resume: ResumeState) -> bool:
    """Return whether ``set_epoch`` has named another pass than that within which a state is."""
    named = dataset._named_epoch() if has_passes(dataset) else None
    return named is not None and named != _pass_of(resume, is_begun=True)


def _pass_of(resume: ResumeState, *, is_begun: bool) -> int:
    """Return the number of the pass of a state's epoch; of the next one after a finished epoch.
    ``is_begun``: whether a pass begins even where nothing is left of the epoch."""
    is_left = is_begun or not all(each.ended for each in resume.workers)
    if not resume.finished and isinstance(resume.dataset, dict):
        return int(resume.dataset.get("epoch", resume.epoch)) + (not is_left)
    for each in resume.workers:
        state = each.state if each.of_dataset and isinstance(each.state, dict) else {}
        if isinstance(state.get("epoch"), int):
            # A worker that has given nothing of the epoch yet has the state of the pass before.
            is_before = resume.finished or not (each.ended or each.num_items)
            is_over = is_before and state.get("finished") and state.get("begun", True)
            return int(state["epoch"]) + bool(is_over)
    return resume.epoch + (resume.finished or not is_left)


def give_state_between_epochs(dataset: Any, state: Any, field: str) -> None:
    """Give a dataset its state before the first item of an epoch; ``field``: its name in the
    loader's state. An epoch that was named after the loader's ``load_state_dict`` counts.
    """
    epoch = dataset._named_epoch() if has_passes(dataset) else None
    give_state(dataset, state, field)
    if epoch is not None:
        dataset.set_epoch(epoch)


def name_saved_pass(dataset: Passes, state: Any) -> None:
    """Let the pass be next that was next when a loader's state was taken, between two epochs,
    unless another one was named since. Raises: ValueError: it is no state of passes."""
    epoch = state.get("epoch") if isinstance(state, dict) else None
    if type(epoch) is not int or epoch < 0:
        raise ValueError(
            "load_state_dict: dataset is not of a PipelineDataset, which this loader has. Make the "
            "loader as it was then."
        )
    if dataset._named_epoch() is None:
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
