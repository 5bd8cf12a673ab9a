"""Hugging Face's Trainer with our loaders."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

try:
    import transformers as _transformers
    from transformers.trainer_utils import seed_worker
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "spdl_torch.transformers needs Hugging Face's Transformers and Accelerate: "
        "pip install transformers accelerate (the extra transformers)."
    ) from error

from torch.utils.data import DataLoader as TorchDataLoader

from .accelerate import loader_like
from .loader.dataloader import DataLoader

__all__ = ["Trainer", "TrainerMixin"]


class TrainerMixin:
    """A mixin that puts our loaders in place of those that a Trainer makes.

    Name it before the Trainer: ``class MyTrainer(TrainerMixin, SFTTrainer)``. The Trainer makes its
    loaders from its ``TrainingArguments`` and shares them out among the ranks as always; a loader
    of another class than torch's DataLoader, made by a method of your own, is left as it is.
    """

    loader_options: ClassVar[Mapping[str, Any]] = {}
    """Further arguments of our DataLoader, such as ``{"isolation": "process"}``."""

    def get_train_dataloader(self) -> Any:
        """Return the Trainer's own loader, rebuilt on ours."""
        trainer: Any = super()
        return self._on_our_loader(trainer.get_train_dataloader())

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return the Trainer's own loader, rebuilt on ours."""
        trainer: Any = super()
        given: Any = self
        name = eval_dataset if isinstance(eval_dataset, str) else "eval"
        dataset = given.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(eval_dataset, str):
            dataset = given.eval_dataset[eval_dataset]
        evaluated = self.__dict__.setdefault("_evaluated", {})
        if evaluated.get(name) is not dataset:
            # With persistent workers the Trainer would return the loader of another dataset. Its
            # workers end before others begin.
            getattr(self, "_eval_dataloaders", {}).pop(name, None)
        evaluated[name] = dataset
        return self._on_our_loader(trainer.get_eval_dataloader(eval_dataset))

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Return the Trainer's own loader, rebuilt on ours."""
        trainer: Any = super()
        return self._on_our_loader(trainer.get_test_dataloader(test_dataset))

    def _on_our_loader(self, prepared: Any) -> Any:
        """Return Accelerate's loader with ours inside it."""
        plain = getattr(prepared, "base_dataloader", None)
        if type(plain) is not TorchDataLoader:
            return prepared
        options = dict(self.loader_options)
        init = plain.worker_init_fn
        if isinstance(init, partial) and init.func is seed_worker:
            # It seeds every generator there is, CUDA's too, and here those are the trainer's own.
            # Our samples already have streams of their own.
            options.setdefault("worker_init_fn", None)
        device = getattr(prepared, "device", None)
        if device is not None and device.type == "cuda":
            options.setdefault("device", device)
        prepared.base_dataloader = loader_like(plain, DataLoader, options)
        prepared.dl_state_dict = prepared.base_dataloader.state_dict()
        return prepared


class Trainer(TrainerMixin, _transformers.Trainer):  # type: ignore[misc]  # not installed for mypy
    """``transformers.Trainer`` whose loaders are ours."""
