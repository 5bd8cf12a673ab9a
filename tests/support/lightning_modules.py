"""Modules and callbacks for Lightning, which is imported with this file: see ``_later``."""

from __future__ import annotations

import inspect

import lightning
import torch
from torch.utils._pytree import tree_leaves, tree_map_only

TAKES_WEIGHTS_ONLY = "weights_only" in inspect.signature(lightning.Trainer.fit).parameters
SAFELY = {"weights_only": True} if TAKES_WEIGHTS_ONLY else {}
"""Has ``fit`` take nothing but plain values from a checkpoint, where Lightning has it so."""


def trainer(**options):
    """A Trainer on the CPU that does nothing but run the loops."""
    names = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    quiet = dict.fromkeys(names, False)
    return lightning.Trainer(**{"max_epochs": 2, "accelerator": "cpu", **quiet, **options})


class Diary(lightning.LightningModule):
    """One weight, and a diary of the batches that every hook saw; takes them alone or nested, where
    None stands for those of a loader that has ended."""

    def __init__(self, touches_estimate=False):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.seen = []
        self.touches_estimate = touches_estimate

    def note(self, hook, batch):
        entry = tree_map_only(torch.Tensor, torch.Tensor.tolist, batch)
        self.seen.append((hook, self.current_epoch, entry))
        tensors = [each for each in tree_leaves(batch) if isinstance(each, torch.Tensor)]
        return self.weight * sum(each.float().mean() for each in tensors)

    def training_step(self, batch, batch_idx):
        return self.note("train", batch)

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.note("val", batch)

    def test_step(self, batch, batch_idx, dataloader_idx=0):
        self.note("test", batch)

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        self.note("predict", batch)
        return batch

    def configure_optimizers(self):
        if self.touches_estimate:
            assert self.trainer.estimated_stepping_batches is not None
        return torch.optim.SGD(self.parameters(), lr=0.001)

    @property
    def num_trained(self):
        """Batches, so far."""
        return sum(hook == "train" for hook, *_ in self.seen)


class EndsByAnError(lightning.Callback):
    """Ends training by an error after a step; None = never."""

    def __init__(self, after, error=None):
        self.after, self.error = after, error or OSError("no room")

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == self.after:
            raise self.error


class Losses(Diary):
    """Logs its loss; optimizes by itself, with so many optimizers, where they are given."""

    def __init__(self, num_optimizers):
        super().__init__()
        self.num_optimizers = num_optimizers
        self.automatic_optimization = num_optimizers is None

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        if self.automatic_optimization:
            return loss
        self.manual_backward(loss)
        for each in self.optimizers():
            each.step()
        return None

    def configure_optimizers(self):
        made = [super(Losses, self).configure_optimizers() for _ in range(self.num_optimizers or 1)]
        return made if self.num_optimizers else made[0]


class SavesInHooks(lightning.Callback):
    """Saves a checkpoint in every hook of training, at the beginning and the end, and where that
    many ``batches`` were trained on: each hook within a step at one of these numbers, the others
    at all at which they are called. ``hooks``: these alone. ``saved`` has the path of each, and the
    number of batches that were trained on before it."""

    WITHIN_STEP = (
        *("on_before_zero_grad", "on_before_backward", "on_after_backward"),
        "on_before_optimizer_step",
    )
    ELSEWHERE = (
        *("on_train_epoch_start", "on_train_epoch_end"),
        *("on_train_batch_start", "on_train_batch_end"),
        *("on_validation_start", "on_validation_epoch_start", "on_validation_batch_start"),
        *("on_validation_batch_end", "on_validation_epoch_end", "on_validation_end"),
    )
    ONCE = ("on_train_start", "on_train_end", "on_fit_end")

    def __init__(self, folder, batches, hooks=None):
        self.folder, self.batches, self.hooks = folder, batches, hooks
        self.saved = []

    def save(self, trainer, name, num_trained):
        path = self.folder / f"{name}-{num_trained}.ckpt"
        places = self.batches
        if name in self.WITHIN_STEP:
            place = self.WITHIN_STEP.index(name) % len(places)
            places = places[place : place + 1]
        is_wanted = num_trained in places or name in self.ONCE
        if self.hooks is not None and name not in self.hooks:
            return
        if is_wanted and not path.exists():
            trainer.save_checkpoint(path)
            self.saved.append((path, num_trained))


def _hook(name):
    def hook(self, trainer, module, *_):
        self.save(trainer, name, module.num_trained - (name in self.WITHIN_STEP))

    return hook


for _name in (*SavesInHooks.WITHIN_STEP, *SavesInHooks.ELSEWHERE, *SavesInHooks.ONCE):
    setattr(SavesInHooks, _name, _hook(_name))
