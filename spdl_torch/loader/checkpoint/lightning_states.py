"""Correct the loader states that Lightning saves and loads by itself.

Lightning saves and loads the states of the training loaders. In six cases even a correct loader
would lose batches:

- the loader has no length: Lightning holds one batch back, so the state is one batch ahead of
  training;
- validation makes a pass over the same loader, which is then the one that the state is of;
- a checkpoint that is saved within a step: Lightning makes that step again, and the loader has
  handed its batch out;
- ``trainer.estimated_stepping_batches`` was read: the loaders are then made before Lightning looks
  for states, which it never loads;
- the state stands within an epoch that ``max_steps`` ended: Lightning counts that as over, and by
  the kind of loader runs what is left of it, or not;
- the state stands after the last batch of an epoch, perhaps by ``limit_train_batches``: if it was
  saved after a step, Lightning runs the next epoch on what is left of this one; if after the
  epoch's end, it loads no state at all, so a generator of the loader would start over, or trains
  on one batch of what is left. And as Lightning never asks a loader with a length for more, a
  sampler without workers has not drawn what it draws as it ends; resuming has.

So a trainer whose fit loop asks a loader for an iterator gets a callback from it. All access to
Lightning's private attributes for this is in this file.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, MutableMapping, Sequence
from itertools import zip_longest
from types import FrameType
from typing import Any

from ..sampling.sampler_chain import has_length, set_sampler_epoch
from ..user_warnings import warn


def follow_trainer() -> None:
    """Correct the states of the trainer whose fit loop is about to iterate over its loaders, if one
    is. Called by ``iter()`` of a loader."""
    if not _PACKAGES & sys.modules.keys():
        return
    loop = _asking_fit_loop()
    if loop is None:
        return
    callbacks = loop.trainer.callbacks
    ours = next((each for each in callbacks if isinstance(each, _Hooks)), None)
    if ours is None:
        package = type(loop).__module__.partition(".loops")[0]
        kinds = (_Hooks, sys.modules[f"{package}.callbacks"].Callback)
        ours = type("LoaderStates", kinds, {"__module__": __name__})()
        callbacks.append(ours)
    ours.see(loop)


def _asking_fit_loop() -> Any:
    """Return the loop of Lightning's that has called us; None = another caller."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if frame.f_code.co_name == "setup_data" and name.endswith(".loops.fit_loop"):
            return frame.f_locals["self"]
        frame = frame.f_back
    return None


_PACKAGES = {"lightning.pytorch.loops.fit_loop", "pytorch_lightning.loops.fit_loop"}


class _Hooks:
    """The hooks of the callback that a trainer gets."""

    def __init__(self) -> None:
        self._saved: list[Any] = []
        """The loaders' states in the checkpoint that training is about to resume."""
        self._held_one_back = False
        """Whether Lightning held a batch back as training ended, and dropped it since."""

    def see(self, loop: Any) -> None:
        """Look at the states that the loaders have been given, before each of them begins."""
        given = [_given_state(each) for each in _flattened(loop) if hasattr(each, "state_dict")]
        self._saved = [new or old for new, old in zip_longest(given, self._saved[: len(given)])]

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Correct a resumed loader where Lightning did not; have the loaders collect states."""
        _correct_resumed_loaders(trainer, self._saved)
        self._saved, self._held_one_back = [], False
        if trainer.checkpoint_callbacks:
            for loader in filter(_is_loader, _flattened(trainer.fit_loop)):
                loader._state.position.want(before=not has_length(loader))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Remember whether the loaders are ahead of training, for a checkpoint that is saved later.
        Lightning is about to drop the batch that says so.
        """
        self._held_one_back = _holds_one_back(trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Remember the same."""
        if trainer.state.fn == "fit":
            self._held_one_back = _holds_one_back(trainer)

    def on_save_checkpoint(
        self, trainer: Any, pl_module: Any, checkpoint: MutableMapping[str, Any]
    ) -> None:
        """Correct the loaders' states: they must describe what has been trained on."""
        progress = trainer.fit_loop.epoch_loop.batch_progress.current
        is_within_step = progress.ready > progress.processed
        is_ahead = self._held_one_back or _holds_one_back(trainer)
        _correct_saved_states(trainer, checkpoint, is_within_step + is_ahead)


def _given_state(loader: Any) -> Any:
    return loader._state_to_resume() if _is_ours(loader) else {}


def _is_ours(loader: Any) -> bool:
    return hasattr(type(loader), "_state_to_resume")


def _is_loader(loader: Any) -> bool:
    """Return whether it is one of ours and no ``PipelineDataset``."""
    return _is_ours(loader) and not hasattr(type(loader), "_begun_pass")


def _holds_one_back(trainer: Any) -> bool:
    """Return whether Lightning has drawn one batch more than it has trained on."""
    return bool(getattr(getattr(trainer.fit_loop, "_data_fetcher", None), "batches", None))


def _correct_saved_states(
    trainer: Any, checkpoint: MutableMapping[str, Any], num_ahead: int
) -> None:
    """Replace states in a checkpoint that are ``num_ahead`` batches ahead of training, or of a pass
    that validation makes over the loader."""
    saved = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
    states: list[Any] = saved.get("combined_loader", [])
    combined = getattr(trainer.fit_loop, "_combined_loader", None)
    iterators = getattr(getattr(combined, "_iterator", None), "iterators", ())
    pairs = zip_longest(_flattened(trainer.fit_loop), iterators)
    pairs_with_states = [each for each in pairs if hasattr(each[0], "state_dict")]
    for number, (loader, iterator) in enumerate(pairs_with_states[: len(states)]):
        if _is_loader(loader):
            position, order = loader._state.position, getattr(iterator, "_order", None)
            if num_ahead or order not in (None, position.order):
                states[number] = position.state(loader, order, num_back=num_ahead)
        elif num_ahead and _is_ours(loader):
            states[number] = loader._state_before(num_ahead)


def _correct_resumed_loaders(trainer: Any, saved: Sequence[Any]) -> None:
    """Load the states that Lightning did not, and begin the epoch that the trainer is about to run.
    Called when training starts. ``saved``: the states that they have been given.
    """
    loop = trainer.fit_loop
    fetcher = getattr(loop, "_data_fetcher", None)
    if fetcher is None or not getattr(loop, "_loaded_from_state_dict", False):
        return
    states = getattr(loop, "_combined_loader_states_to_load", None)
    if states:
        loop._combined_loader._load_state_dicts(states)
        loop._combined_loader_states_to_load = []
        saved = states
        iter(fetcher)
    # If an epoch was over, Lightning is about to run the next one or, in step-based training, the
    # end of that one again, for which an exhausted iterator is right.
    loaders = [_Resumed(trainer, *pair) for pair in enumerate(_with_states(trainer, saved))]
    progress = loop.epoch_loop.batch_progress
    if loop.restarted_on_epoch_start:
        progress.reset_on_run()  # that of the epoch before
    is_left = progress.current.processed >= loop.max_batches
    enough = any if loop._combined_loader._mode == "min_size" else all
    is_over = is_left or enough([each.is_over for each in loaders])
    ends_again = False
    if states and not loop.restarting:
        if all(each.is_at_start for each in loaders):
            return  # saved before the first batch of an epoch, which iter() has begun
        is_left_out = not is_over and not progress.is_last_batch
        if is_left_out and trainer.is_global_zero and any(each.is_ours for each in loaders):
            _warn_of_rest(loop.epoch_progress.current.processed)
        # Run the rest of the epoch: with another number of ranks it may be longer.
        begins = not all(each.has_finished for each in loaders)
    else:
        begins = is_over and (
            loop.epoch_loop.restarted_on_train_batch_end or loop.restarted_on_epoch_start
        )
        ends_again = is_over and not begins
    has_length = fetcher.length is not None
    for each in loaders:
        each.correct(begins, is_over, has_length, ends_again and not has_length)
    if begins:
        for each in loaders:
            each.name_epoch(loop.epoch_progress.current.processed)
        iter(fetcher)
    elif is_left and loop.restarting:
        fetcher.batches, fetcher.done = [], True  # as if nothing was left


def _warn_of_rest(epoch: int) -> None:
    warn(
        f"DataLoader.load_state_dict: training had stopped within epoch {epoch - 1}, by max_steps "
        f"or should_stop, and Lightning counts that epoch as over: it begins epoch {epoch}, and "
        f"leaves out the batches that were left of epoch {epoch - 1}. Resume with max_steps to "
        "train on them first."
    )


class _Resumed:
    """One of the loaders that a resumed trainer has, whose iterator Lightning has asked for."""

    def __init__(self, trainer: Any, number: int, loader_and_state: tuple[Any, Any]) -> None:
        self._combined = trainer.fit_loop._combined_loader
        self._number = number
        self._loader, self._state = loader_and_state
        self.is_ours = _is_ours(self._loader)
        self.has_finished = self._state is None or self._state.get("finished", True)
        """Whether the loader had said that its epoch was over."""
        self.is_at_start = not (self.has_finished or _num_received(self._state))
        self._nothing_left = self.is_ours and self._loader._ends_empty_tail()  # once: it may act
        self.is_over = self._nothing_left or (self._state is not None and self.has_finished)
        """Whether nothing is left of its epoch."""
        self._is_on = False  # whether its next iter() is for the epoch after that

    def correct(self, begins: bool, is_over: bool, has_length: bool, ends_again: bool) -> None:
        """Have the loader where the trainer needs it. ``begins``: another epoch is about to;
        ``is_over``: that of the trainer is; ``has_length``: else Lightning asks one batch ahead;
        ``ends_again``: it has done so for an epoch whose end it makes again, and begins the next.
        """
        loader, goes_on = self._loader, begins or not is_over
        if not self.is_ours:
            return
        if self._state is not None and self.has_finished and (goes_on or ends_again):
            # iter() has begun its next epoch, which comes again, or later.
            loader.load_state_dict(self._state)
            self._is_on = True
        elif not _is_loader(loader):
            goes_over = is_over or begins
            self._is_on = self._nothing_left
            if goes_over and not self.is_over:
                loader._begun_pass()  # no iter() has begun what is left: the next one would
        elif has_length and (begins or is_over):
            loader._state.position.undo_look_ahead(loader)
        if self._is_on and not is_over and self._combined._mode == "max_size":
            self._combined._iterator.iterators[self._number] = iter(())

    def name_epoch(self, epoch: int) -> None:
        """Set the epoch of its sampler, which Lightning does later: workers' indices are drawn as
        the epoch begins."""
        if _is_loader(self._loader):
            set_sampler_epoch(self._loader._index_sampler, epoch)


def _num_received(state: Mapping[str, Any]) -> int:
    """Return the number of samples, or items, that a state of ours says were received."""
    own = int(state.get("num_samples", 0)) + int(state.get("num_items", 0))
    of_workers = sum(int(each["num_items"]) for each in state.get("workers", ()))
    return own + len(state.get("ahead", ())) + of_workers


def _with_states(trainer: Any, saved: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Return each loader with its state in the checkpoint; None = it has none."""
    states = iter(saved)
    loaders = _flattened(trainer.fit_loop)
    return [(each, next(states, None) if hasattr(each, "state_dict") else None) for each in loaders]


def _flattened(loop: Any) -> list[Any]:
    return list(getattr(loop._combined_loader, "flattened", []))
