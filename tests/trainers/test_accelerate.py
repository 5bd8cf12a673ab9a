"""Accelerate and Hugging Face's Trainer: the line that keeps our loader."""

from __future__ import annotations

import importlib
import os
from typing import ClassVar

import pytest
import torch
from support.datasets import Made
from support.later import later
from torch.utils import data as torch_data

from spdl_torch import DataLoader

accelerate, prepares = later("accelerate", "spdl_torch.accelerate")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

DATA = torch.arange(20.0)


@pytest.fixture
def hugging_face():
    """What is ours for its Trainer."""
    pytest.importorskip("transformers")
    return importlib.import_module("spdl_torch.transformers")


def loader(**options):
    return DataLoader(DATA, batch_size=4, num_workers=2, **options)


def test_prepare_of_our_accelerator_keeps_the_loader_and_its_options():
    """One import changed; models and other loaders are prepared as ever."""
    accelerator = prepares.Accelerator(cpu=True)
    model = torch.nn.Linear(1, 1)
    plain = torch_data.DataLoader(DATA, batch_size=4)
    options = {"seed": 3, "rng": "sample", "on_error": "skip", "isolation": "process"}
    prepared_model, ours, theirs = accelerator.prepare(model, loader(**options), plain)
    assert prepared_model is model
    assert type(ours.base_dataloader) is DataLoader
    assert {name: getattr(ours.base_dataloader, name) for name in options} == options
    assert ours.num_workers == 2
    assert type(theirs.base_dataloader) is torch_data.DataLoader
    assert accelerator.prepare(ours) is ours
    assert {id(each) for each in accelerator._dataloaders} == {id(ours), id(theirs)}


def subclasses(base):
    """Subclasses with constructors of their own, as repositories write them."""

    class Passing(base):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)

    class Named(base):
        def __init__(self, dataset, scale, *, size):
            self.factor = scale
            super().__init__(dataset, batch_size=size, shuffle=True)

        def __iter__(self):
            return (self.factor * batch for batch in super().__iter__())

    class Slow(base):
        def __init__(self, **options):
            super().__init__(**options, persistent_workers=True)

    return (
        Passing(DATA, 3, drop_last=True),
        Named(DATA, 2, size=6),
        Slow(dataset=DATA, num_workers=1, batch_size=5),
    )


def test_batches_are_those_of_accelerate_itself():
    """Order and batches; the report works on what prepare returned. Of a subclass with a
    constructor of its own its class, attributes and methods stay: the batches are those that
    Accelerate makes of the same subclass of torch's loader, but for methods, which that one
    loses."""
    got, want = [], []
    for seen, kind, base in (
        (got, prepares.Accelerator, DataLoader),
        (want, accelerate.Accelerator, torch_data.DataLoader),
    ):
        torch.manual_seed(5)
        plain = base(DATA, batch_size=3, shuffle=True, num_workers=0)
        for each in (plain, *subclasses(base)):
            prepared = kind(cpu=True).prepare(each)
            seen.append([batch.tolist() for _ in range(2) for batch in prepared])
            if seen is got:
                assert type(prepared.base_dataloader) is type(each)
                assert vars(each).get("factor") == vars(prepared.base_dataloader).get("factor")
                assert prepared.report().stats.stages[0].name == "fetch"
    want[2] = [[2 * value for value in batch] for batch in want[2]]
    assert got == want


DRAWN = Made(lambda n: {"x": torch.tensor([n, torch.rand(()).item()]), "labels": float(n)}, 24)
PLACES = Made(lambda _: {"x": torch.zeros(2), "labels": float(os.getpid())}, 24)
"""Samples that draw, so that seeding shows; and some labelled with the process that made them."""


PERSISTENT = {"dataloader_persistent_workers": True}


class Model(torch.nn.Module):
    """Remembers what it was trained on."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.seen = []

    def forward(self, x, labels=None):
        self.seen.append(labels.tolist())
        return {"loss": (self.layer(x).squeeze(1) - labels).square().mean(), "logits": x}


def test_trainer_keeps_its_order_on_our_loader(tmp_path, hugging_face):
    """Same samples in the same order as theirs, for training, evaluation and prediction."""
    transformers = pytest.importorskip("transformers")

    class Ours(hugging_face.TrainerMixin, transformers.Trainer):
        loader_options: ClassVar = {"seed": 7}

    seen = []
    for kind in (transformers.Trainer, hugging_face.Trainer, Ours):
        options = {"per_device_train_batch_size": 4, "num_train_epochs": 2, "seed": 3}
        trainer = trainer_of(kind, tmp_path, **options)
        trainer.eval_dataset = DRAWN
        trainer.train()
        trainer.evaluate()
        trainer.predict(DRAWN)
        seen.append(trainer.model.seen)
        if kind is not transformers.Trainer:
            loaders = trainer.get_train_dataloader(), trainer.get_eval_dataloader()
            for each in (*loaders, trainer.get_test_dataloader(DRAWN)):
                assert type(each.base_dataloader) is DataLoader
                assert each.base_dataloader.worker_init_fn is None
                assert each.base_dataloader.seed == (7 if kind is Ours else None)
            assert trainer.callback_handler.train_dataloader.report().stats.elapsed > 0
    assert seen[0] == seen[1] == seen[2]
    assert len(seen[0]) == 2 * 6 + 3 + 3


def trainer_of(kind, folder, **options):
    """A trainer of either kind, whose evaluation samples say where they were made."""
    transformers = pytest.importorskip("transformers")
    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "save_strategy": "no"}
    arguments = transformers.TrainingArguments(
        str(folder), dataloader_num_workers=1, dataloader_pin_memory=False, **quiet, **options
    )
    datasets = {"train_dataset": DRAWN, "eval_dataset": PLACES}
    return kind(model=Model(), args=arguments, **datasets)


def labels_of(trainer, call):
    """The labels that the model sees during a call."""
    trainer.model.seen.clear()
    call()
    return {label for batch in trainer.model.seen for label in batch}


@pytest.mark.parametrize("given", [PERSISTENT, {}], ids=["persistent", "new"])
def test_trainer_evaluates_with_the_same_workers(tmp_path, hugging_face, given):
    """From one evaluation to the next."""
    trainer = trainer_of(hugging_face.Trainer, tmp_path, **given)
    first, second = (labels_of(trainer, trainer.evaluate) for _ in range(2))
    assert len(first) == len(second) == 1
    assert os.getpid() not in first
    assert (first == second) is bool(given)


def test_trainer_evaluates_with_the_same_workers_while_it_trains(tmp_path, hugging_face):
    """After every epoch; they are those of a call by itself."""
    options = {"num_train_epochs": 3, "eval_strategy": "epoch", **PERSISTENT}
    trainer = trainer_of(hugging_face.Trainer, tmp_path, **options)
    seen = labels_of(trainer, trainer.train) - {float(label) for label in range(24)}
    assert len(seen) == 1
    assert labels_of(trainer, trainer.evaluate) == seen


def test_trainer_evaluates_the_dataset_that_it_is_given(tmp_path, hugging_face):
    """However warm the workers of another one are; those of the first name stay."""
    trainer = trainer_of(hugging_face.Trainer, tmp_path, **PERSISTENT)
    trainer.eval_dataset = {"here": PLACES, "numbers": DRAWN}
    numbers = {float(label) for label in range(24)}
    first = labels_of(trainer, lambda: trainer.evaluate(trainer.eval_dataset["here"]))
    assert labels_of(trainer, lambda: trainer.evaluate(DRAWN)) == numbers
    both = labels_of(trainer, trainer.evaluate)
    assert numbers < both
    assert len(both - numbers) == 1
    assert both.isdisjoint(first)
    assert labels_of(trainer, trainer.evaluate) == both
