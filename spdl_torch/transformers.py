"""Hugging Face's Trainer with our loaders."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, NamedTuple

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
        """Return the Trainer's own loader, rebuilt on ours; the same one for the same dataset, if
        workers are persistent."""
        trainer: Any = super()
        given: Any = self
        name = eval_dataset if isinstance(eval_dataset, str) else "eval"
        dataset = given.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(eval_dataset, str):
            dataset = given.eval_dataset[eval_dataset]

        def make() -> Any:
            # The Trainer, too, keeps one under its name, and would return it for another dataset.
            getattr(self, "_eval_dataloaders", {}).pop(name, None)
            return trainer.get_eval_dataloader(eval_dataset)

        return self._kept(f"evaluate {name}", dataset, make)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Return the Trainer's own loader, rebuilt on ours; the same one for the same dataset, if
        workers are persistent."""
        trainer: Any = super()
        return self._kept(
            "predict", test_dataset, lambda: trainer.get_test_dataloader(test_dataset)
        )

    def _kept(self, use: str, dataset: Any, make: Callable[[], Any]) -> Any:
        """Return the loader of the last such call if it was for the same dataset and its workers
        are persistent, else a new one."""
        trainer: Any = self
        arguments = trainer.args
        is_persistent = arguments.dataloader_persistent_workers
        if not self.loader_options.get("persistent_workers", is_persistent):
            return self._on_our_loader(make())
        all_kept: dict[str, _Kept] = self.__dict__.setdefault("_kept_loaders", {})
        made_from = dataset, trainer.data_collator, arguments.eval_batch_size
        if use not in all_kept or not all_kept[use].is_made_from(*made_from):
            all_kept.pop(use, None)  # its workers end before others begin
            all_kept[use] = _Kept(self._on_our_loader(make()), *made_from)
        return all_kept[use].loader

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


class _Kept(NamedTuple):
    """A loader, and what it was made from."""

    loader: Any
    dataset: Any
    collator: Any
    batch_size: int

    def is_made_from(self, dataset: Any, collator: Any, batch_size: int) -> bool:
        is_same = self.dataset is dataset and self.collator is collator
        return is_same and self.batch_size == batch_size


class Trainer(TrainerMixin, _transformers.Trainer):  # type: ignore[misc]  # not installed for mypy
    """``transformers.Trainer`` whose loaders are ours."""
