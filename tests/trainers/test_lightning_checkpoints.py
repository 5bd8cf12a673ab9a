"""Lightning's checkpoints, of every kind and saved in every hook: what is trained after one is what
would have been trained without it. No callback of ours is given to the trainer."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
from _later import LIGHTNINGS_WARNINGS, later
from _loader_helpers import DataLoader
from torch.utils.data import DistributedSampler, IterableDataset

from spdl_torch import PipelineDataset
from spdl_torch.data.sources import ListSource
from spdl_torch.pipeline import PipelineBuilder

_, modules, callbacks = later("lightning", "_lightning_modules", "lightning.pytorch.callbacks")

pytestmark = LIGHTNINGS_WARNINGS

ROWS = torch.arange(12.0).view(6, 2)
"""Three batches of two."""


class Stream(IterableDataset):
    """The rows without a length."""

    thread_safe = True

    def __iter__(self):
        return iter(ROWS)


def plain(loader, num_workers):
    return loader(ROWS, batch_size=2, num_workers=num_workers)


def shuffled(loader, num_workers):
    generator = torch.Generator().manual_seed(3)
    return loader(ROWS, 2, shuffle=True, generator=generator, num_workers=num_workers)


def divided(loader, num_workers):
    """Its order is that of the epoch, which Lightning names."""
    sampler = DistributedSampler(ROWS, num_replicas=1, rank=0)
    return loader(ROWS, 2, sampler=sampler, num_workers=num_workers)


def unsized(loader, num_workers):
    return loader(Stream(), batch_size=2, num_workers=min(num_workers, 1))


def piped(loader, num_workers):
    """A pipeline whose passes differ, with a length."""
    source = ListSource(ROWS.view(3, 2, 2)).shuffle(1)
    dataset = PipelineDataset(PipelineBuilder().add_source(source).add_sink())
    dataset.thread_safe = True
    return loader(dataset, batch_size=None, num_workers=min(num_workers, 1))


COUNTED = {
    "epochs": {"max_epochs": 3},
    "steps": {"max_epochs": -1, "max_steps": 9},
}
VALIDATED = {
    "never": {},
    "after": {"check_val_every_n_epoch": 1},
    "within": {"val_check_interval": 2},
}


def fit(
    loader, saving=(), *, checkpoint=None, validated="never", touches_estimate=False, **options
):
    """Train; return the batches that the model has seen, each with its epoch."""
    trainer = modules.trainer(
        **options,
        **VALIDATED[validated],
        enable_checkpointing=any(isinstance(each, callbacks.ModelCheckpoint) for each in saving),
        num_sanity_val_steps=0,
        callbacks=list(saving),
    )
    kind = modules.Diary if validated == "never" else modules.ValidatedDiary
    model = kind(touches_estimate)
    held_out = None if validated == "never" else torch.utils.data.DataLoader(ROWS, 3)
    trainer.fit(model, loader, held_out, ckpt_path=checkpoint)
    return model.seen


WAYS = [
    (plain, 0, "epochs", "within", False),
    (shuffled, 2, "epochs", "after", True),
    (unsized, 2, "steps", "after", False),
    (plain, 2, "steps", "never", True),
    (shuffled, 0, "steps", "within", False),
    (unsized, 0, "epochs", "never", True),
    (piped, 0, "epochs", "after", False),
    (piped, 2, "steps", "within", False),
    (divided, 2, "epochs", "never", False),
]
SETTINGS = ("make", "num_workers", "counted", "validated", "touches_estimate")
PLACES = [[2, 3, 4], [3, 4, 2], [4, 2, 3]]
"""Within an epoch, at its end, and behind the next one's first batch; each comes first."""


@pytest.mark.parametrize(
    (*SETTINGS, "places"), [(*way, PLACES[number % 3]) for number, way in enumerate(WAYS)]
)
def test_checkpoint_of_any_hook_resumes_at_the_next_batch(
    tmp_path, make, num_workers, counted, validated, touches_estimate, places
):
    """Also within a step, which Lightning makes again."""
    options = {"validated": validated, "touches_estimate": touches_estimate, **COUNTED[counted]}
    saving = modules.SavesInHooks(tmp_path, batches=places)
    whole = fit(make(DataLoader, num_workers), [saving], **options)
    assert len(whole) == 9
    assert_rest_is_trained(whole, saving.saved, lambda: make(DataLoader, num_workers), options)


@pytest.mark.parametrize(SETTINGS, [*WAYS[:3], WAYS[6]])
def test_checkpoint_of_any_kind_resumes_at_the_next_batch(
    tmp_path, make, num_workers, counted, validated, touches_estimate
):
    """Every few steps, epochs or seconds, before and after a validation, and the last one."""

    def kind(name, **when):
        made = callbacks.ModelCheckpoint(tmp_path / name, "{step}-{epoch}", save_top_k=-1, **when)
        kinds.append(made)

    kinds = []
    kind("steps", every_n_train_steps=3)
    kind("last", every_n_train_steps=4, save_last=True)
    kind("epochs", every_n_epochs=1, save_on_train_epoch_end=True)
    kind("after", every_n_epochs=1, save_on_train_epoch_end=False, mode="max")
    kind("seconds", train_time_interval=timedelta(0))
    options = {"validated": validated, "touches_estimate": touches_estimate, **COUNTED[counted]}
    whole = fit(make(DataLoader, num_workers), kinds, **options)
    saved = [(path, step_of(path)) for path in sorted(tmp_path.rglob("*.ckpt"))]
    saved = [(path, step) for path, step in saved if 3 <= step <= 5 or path.stem == "last"]
    assert {str(path.parent) for path, _ in saved} == {each.dirpath for each in kinds}
    assert_rest_is_trained(whole, saved, lambda: make(DataLoader, num_workers), options)


def step_of(path):
    return torch.load(path, weights_only=False)["global_step"]


def assert_rest_is_trained(whole, saved, make, options):
    for path, num_trained in saved:
        seen = fit(make(), checkpoint=path, **options)
        rest = whole[num_trained:]
        assert [batch for _, batch in seen] == [batch for _, batch in rest], path.name
        # Counting steps, without a length, Lightning does not know that an epoch was over.
        knows = "epoch_end" not in path.name and path.parent.name != "epochs"
        if knows or "max_steps" not in options:
            assert seen == rest, path.name


@pytest.mark.parametrize(("make", "num_workers"), [(plain, 2), (unsized, 0)])
@pytest.mark.parametrize("when", ["every_n_train_steps", "every_n_epochs"])
def test_what_follows_an_epochs_last_step_is_what_torchs_loader_trains(
    tmp_path, when, make, num_workers
):
    """Each with a checkpoint of its own, saved after as many steps as an epoch has, or after it."""
    every = {"every_n_train_steps": 3, "every_n_epochs": 1}[when]
    seen = []
    for loader in (torch.utils.data.DataLoader, DataLoader):
        folder = tmp_path / loader.__module__
        saving = callbacks.ModelCheckpoint(folder, "{step}", **{when: every}, save_top_k=-1)
        fit(make(loader, num_workers), [saving], max_epochs=2)
        for step in (3, 6):
            resumed = make(loader, num_workers)
            seen.append(fit(resumed, checkpoint=folder / f"step={step}.ckpt", max_epochs=3))
    assert seen[:2] == seen[2:]
    assert [len(each) for each in seen] == [6, 3, 6, 3]


def test_trainer_gets_its_callback_once(tmp_path):
    """However many loaders, epochs and calls of ``fit`` there are, and none for torch's loader."""
    trainer = modules.trainer(default_root_dir=tmp_path)
    before = len(trainer.callbacks)
    trainer.fit(modules.Diary(False), plain(torch.utils.data.DataLoader, 0))
    assert len(trainer.callbacks) == before
    for _ in range(2):
        trainer.fit(modules.Diary(False), [plain(DataLoader, 0), shuffled(DataLoader, 0)])
    assert len(trainer.callbacks) == before + 1
