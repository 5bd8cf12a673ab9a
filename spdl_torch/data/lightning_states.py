"""Correct, from a callback, the loader states that Lightning itself saves and loads.

Lightning 2.6 saves and loads the states of the training loaders. In four cases even a correct
loader would lose batches:

- the loader has no length: Lightning holds one batch back, so the state is one batch ahead of
  training;
- ``trainer.estimated_stepping_batches`` was read: the loaders are then made before Lightning looks
  for states, which it never loads;
- the state stands within an epoch that ``max_steps`` ended: Lightning counts that as over, and by
  the kind of loader runs what is left of it, or not;
- the state stands after the last batch of an epoch, perhaps by ``limit_train_batches``: if it was
  saved after a step, Lightning runs the next epoch on what is left of this one; if after the
  epoch's end, it loads no state at all, so a generator of the loader would start over, or trains
  on one batch of what is left. And as Lightning never asks a loader with a length for more, a
  sampler without workers has not drawn what it draws as it ends; resuming has.

All access to Lightning's private attributes for this is in this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .dataset import PipelineDataset
from .loader import for_trainers
from .loader.dataloader import DataLoader
from .sampling.sampler_chain import has_length
from .user_warnings import warn

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping, Sequence


def want_states(trainer: Any) -> None:
    """Make the loaders collect states for checkpoints. Called when training starts."""
    if not trainer.checkpoint_callbacks:
        return
    for loader in _flattened(trainer):
        if isinstance(loader, DataLoader):
            for_trainers.want_states(loader, before_last=not has_length(loader))


def holds_one_back(trainer: Any) -> bool:
    """Return whether Lightning has drawn one batch more than it has trained on."""
    return bool(getattr(getattr(trainer.fit_loop, "_data_fetcher", None), "batches", None))


def correct_saved_states(trainer: Any, checkpoint: MutableMapping[str, Any]) -> None:
    """Replace states in a checkpoint that are one batch ahead of training. Called while it is
    made."""
    loaders = [loader for loader in _flattened(trainer) if hasattr(loader, "state_dict")]
    states = saved_states(checkpoint)
    for number, loader in enumerate(loaders[: len(states)]):
        if isinstance(loader, DataLoader | PipelineDataset):
            states[number] = loader._state_before_last()


def saved_states(checkpoint: Mapping[str, Any]) -> list[Any]:
    """Return the states of the training loaders in a checkpoint, in their order."""
    saved = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
    states: list[Any] = saved.get("combined_loader", [])
    return states


def correct_resumed_loaders(trainer: Any, saved: Sequence[Any]) -> None:
    """Load the states that Lightning did not, and begin the epoch that the trainer is about to run.
    Called when training starts. ``saved``: the states in the checkpoint.
    """
    loop = trainer.fit_loop
    fetcher = getattr(loop, "_data_fetcher", None)
    if fetcher is None or not getattr(loop, "_loaded_from_state_dict", False):
        return
    states = getattr(loop, "_combined_loader_states_to_load", None)
    if states:
        loop._combined_loader._load_state_dicts(states)
        loop._combined_loader_states_to_load = []
        iter(fetcher)
    # If an epoch was over, Lightning is about to run the next one or, in step-based training, the
    # end of that one again, for which an exhausted iterator is right.
    loaders = [_Resumed(trainer, *pair) for pair in enumerate(_with_states(trainer, saved))]
    progress = loop.epoch_loop.batch_progress
    is_left = progress.current.ready >= loop.max_batches
    enough = any if loop._combined_loader._mode == "min_size" else all
    is_over = is_left or enough([each.is_over for each in loaders])
    if states and not loop.restarting:
        is_left_out = not is_over and not progress.is_last_batch
        if is_left_out and trainer.is_global_zero and any(each.is_ours for each in loaders):
            _warn_of_rest(loop.epoch_progress.current.processed)
        # Run the rest of the epoch: with another number of ranks it may be longer.
        begins = not all(each.has_finished for each in loaders)
    else:
        begins = is_over and loop.epoch_loop.restarted_on_train_batch_end
    for each in loaders:
        each.correct(begins=begins, is_over=is_over, has_length=fetcher.length is not None)
    if begins:
        iter(fetcher)
    elif is_left and loop.restarting:
        fetcher.batches, fetcher.done = [], True  # as if nothing was left


def _warn_of_rest(epoch: int) -> None:
    warn(
        f"PipelineStatsMonitor: training had stopped within epoch {epoch - 1}, by max_steps or "
        f"should_stop, and Lightning counts that epoch as over: it begins epoch {epoch}, and "
        f"leaves out the batches that were left of epoch {epoch - 1}. Resume with max_steps to "
        "train on them first."
    )


class _Resumed:
    """One of the loaders that a resumed trainer has, whose iterator Lightning has asked for."""

    def __init__(self, trainer: Any, number: int, loader_and_state: tuple[Any, Any]) -> None:
        self._combined = trainer.fit_loop._combined_loader
        self._number = number
        self._loader, self._state = loader_and_state
        self.is_ours = isinstance(self._loader, DataLoader | PipelineDataset)
        self.has_finished = self._state is None or self._state.get("finished", True)
        """Whether the loader had said that its epoch was over."""
        self._nothing_left = _nothing_left(self._loader)  # asked once: it may act
        self.is_over = self._nothing_left or (self._state is not None and self.has_finished)
        """Whether nothing is left of its epoch."""
        self._is_on = False  # whether its next iter() is for the epoch after that

    def correct(self, *, begins: bool, is_over: bool, has_length: bool) -> None:
        """Have the loader where the trainer needs it. ``begins``: another epoch is about to;
        ``is_over``: that of the trainer is; ``has_length``: else Lightning asks one batch ahead.
        """
        loader, goes_on = self._loader, begins or not is_over
        is_pipeline = isinstance(loader, PipelineDataset)
        if not self.is_ours:
            return
        if self._state is not None and self.has_finished and goes_on:
            # iter() has begun its next epoch, which comes again, or later.
            loader.load_state_dict(self._state)
            self._is_on = True
        elif is_pipeline:
            goes_over = is_over or begins
            self._is_on = self._nothing_left
            if goes_over and not self.is_over:
                loader._begun_pass()  # no iter() has begun what is left: the next one would
        elif has_length and (begins or is_over):
            for_trainers.undo_look_ahead(loader)
        if self._is_on and not is_over and self._combined._mode == "max_size":
            self._combined._iterator.iterators[self._number] = iter(())


def _with_states(trainer: Any, saved: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Return each loader with its state in the checkpoint; None = it has none."""
    states = iter(saved)
    loaders = _flattened(trainer)
    return [(each, next(states, None) if hasattr(each, "state_dict") else None) for each in loaders]


def _flattened(trainer: Any) -> list[Any]:
    return list(getattr(trainer.fit_loop._combined_loader, "flattened", []))


def _nothing_left(loader: Any) -> bool:
    if isinstance(loader, DataLoader):
        return for_trainers.nothing_was_left(loader)
    return isinstance(loader, PipelineDataset) and loader._ends_empty_tail()
