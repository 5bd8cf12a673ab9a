"""What Lightning's own saving and loading of loader states gets wrong, put right from a callback.

Lightning 2.6 saves and loads the states of the training loaders itself. In three cases a loader
that does everything right would lose batches:

- the loader has no length: Lightning holds one batch back, so the state is one batch ahead of what
  was trained;
- ``trainer.estimated_stepping_batches`` was asked for: the loaders are made before Lightning looks
  for states, which it then never loads;
- the state stands behind the last batch of an epoch: behind a step, Lightning goes on with the next
  epoch on the iterator that has nothing left; behind the epoch's end it loads no state at all, so
  that a generator of the loader's would begin anew.

All access to Lightning's private attributes for this is here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .dataset import PipelineDataset
from .loader.dataloader import DataLoader

if TYPE_CHECKING:
    from collections.abc import MutableMapping

__all__ = ["correct_resumed_loaders", "correct_saved_states", "want_states"]


def want_states(trainer: Any) -> None:
    """Let the loaders know that checkpoints will hold their states: called when training starts."""
    if not trainer.checkpoint_callbacks:
        return
    for loader in _flattened(trainer):
        if isinstance(loader, DataLoader):
            loader._state.want(before=not _has_length(loader))


def correct_saved_states(trainer: Any, checkpoint: MutableMapping[str, Any]) -> None:
    """Let the states in a checkpoint be of what was trained: called while it is made."""
    fetcher = getattr(trainer.fit_loop, "_data_fetcher", None)
    if not getattr(fetcher, "batches", None):
        return  # nothing is held back
    saved = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
    loaders = [loader for loader in _flattened(trainer) if hasattr(loader, "state_dict")]
    states = saved.get("combined_loader", [])
    for number, loader in enumerate(loaders[: len(states)]):
        if isinstance(loader, DataLoader | PipelineDataset):
            states[number] = loader._state_before_last()


def correct_resumed_loaders(trainer: Any) -> None:
    """Load what was not loaded, and begin the epoch that the trainer is about to run: called when
    training starts.
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
    # Where an epoch was over, Lightning is about to run the next one, or (iteration-based training)
    # through the end of that one again, for which an iterator with nothing left is right.
    are_over = [_nothing_left(loader) for loader in _flattened(trainer)]  # each has to be asked
    if states and not loop.restarting:
        # Whatever is left of it: with other ranks an epoch may be longer.
        if not all(state.get("finished", True) for state in states):
            iter(fetcher)
    elif loop.epoch_loop.restarted_on_train_batch_end and any(are_over):
        iter(fetcher)


def _has_length(loader: Any) -> bool:
    """Otherwise Lightning holds one batch back."""
    try:
        len(loader)
    except (TypeError, NotImplementedError):
        return False
    return True


def _flattened(trainer: Any) -> list[Any]:
    return list(getattr(trainer.fit_loop._combined_loader, "flattened", []))


def _nothing_left(loader: Any) -> bool:
    if isinstance(loader, DataLoader):
        progress = loader._state.progress
        return progress is not None and progress.nothing_left
    return isinstance(loader, PipelineDataset) and loader._ends_empty_tail()
