"""Correct, from a callback, the loader states that Lightning itself saves and loads.

Lightning 2.6 saves and loads the states of the training loaders. In three cases even a correct
loader would lose batches:

- the loader has no length: Lightning holds one batch back, so the state is one batch ahead of
  training;
- ``trainer.estimated_stepping_batches`` was read: the loaders are then made before Lightning looks
  for states, which it never loads;
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
from .loader.dataloader import DataLoader
from .sampling.sampler_chain import has_length

if TYPE_CHECKING:
    from collections.abc import MutableMapping


def want_states(trainer: Any) -> None:
    """Make the loaders collect states for checkpoints. Called when training starts."""
    if not trainer.checkpoint_callbacks:
        return
    for loader in _flattened(trainer):
        if isinstance(loader, DataLoader):
            loader._state.want(before=not has_length(loader))


def correct_saved_states(trainer: Any, checkpoint: MutableMapping[str, Any]) -> None:
    """Replace states in a checkpoint that are ahead of training. Called while it is made."""
    fetcher = getattr(trainer.fit_loop, "_data_fetcher", None)
    if not getattr(fetcher, "batches", None):
        return  # Lightning holds no batch back
    saved = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
    loaders = [loader for loader in _flattened(trainer) if hasattr(loader, "state_dict")]
    states = saved.get("combined_loader", [])
    for number, loader in enumerate(loaders[: len(states)]):
        if isinstance(loader, DataLoader | PipelineDataset):
            states[number] = loader._state_before_last()


def correct_resumed_loaders(trainer: Any) -> None:
    """Load the states that Lightning did not, and begin the epoch that the trainer is about to run.
    Called when training starts.
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
    # If an epoch was over, Lightning is about to run the next one or, in iteration-based training,
    # the end of that one again, for which an exhausted iterator is right.
    are_over = [_nothing_left(loader) for loader in _flattened(trainer)]  # ask each: it may act
    is_left = loop.epoch_loop.batch_progress.current.ready >= loop.max_batches
    if states and not loop.restarting:
        # Run the rest of the epoch: with another number of ranks it may be longer.
        begins = not all(state.get("finished", True) for state in states)
    else:
        begins = loop.epoch_loop.restarted_on_train_batch_end and (is_left or any(are_over))
    if fetcher.length is not None:  # else Lightning had asked for a batch behind the last one
        for loader, is_over in zip(_flattened(trainer), are_over, strict=True):
            if isinstance(loader, DataLoader) and (begins or is_left or is_over):
                loader._state.undo_look_ahead(loader)
            elif isinstance(loader, PipelineDataset) and is_left and not is_over:
                loader._begun_pass()  # no iter() has begun what is left of it: the next one would
    if begins:
        iter(fetcher)
    elif is_left and loop.restarting:
        fetcher.batches, fetcher.done = [], True  # as if nothing was left


def _flattened(trainer: Any) -> list[Any]:
    return list(getattr(trainer.fit_loop._combined_loader, "flattened", []))


def _nothing_left(loader: Any) -> bool:
    if isinstance(loader, DataLoader):
        progress = loader._state.progress
        return progress is not None and progress.begun.nothing_left
    return isinstance(loader, PipelineDataset) and loader._ends_empty_tail()
