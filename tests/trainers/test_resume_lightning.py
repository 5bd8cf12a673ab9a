"""Resuming inside Lightning: every batch of every epoch is trained on once, whatever was saved."""

from __future__ import annotations

import functools
import warnings
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from _datasets import ShuffledSource
from _later import LIGHTNINGS_WARNINGS, later
from _loader_helpers import DataLoader
from torch.utils.data import Dataset, IterableDataset, RandomSampler

from spdl_torch import PipelineDataset
from spdl_torch.loader.checkpoint import user_state
from spdl_torch.pipeline import PipelineBuilder

_, modules, callbacks, utilities, ours = later(
    *("lightning", "_lightning_modules", "lightning.pytorch.callbacks"),
    *("lightning.pytorch.utilities", "spdl_torch.lightning"),
)

pytestmark = LIGHTNINGS_WARNINGS

NUM_EPOCHS = 3


class Pairs(Dataset):
    """Sample i is the number i and what it drew; loaded on threads."""

    thread_safe = True

    def __init__(self, length=10):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.tensor([float(index), torch.rand(()).item()])


class PairStream(IterableDataset):
    """The same without a length; loaded in processes."""

    def __iter__(self):
        for index in range(10):
            yield torch.tensor([float(index), torch.rand(()).item()])


def shuffled(length, num_workers, *, drop_last=True):
    """Batches of three; if all are full, whoever draws them need not ask the sampler for its
    end."""
    generator = torch.Generator().manual_seed(4)
    options = {"shuffle": True, "generator": generator, "seed": 1, "drop_last": drop_last}
    return DataLoader(Pairs(length), 3, num_workers=num_workers, **options)


def replacing(num_workers):
    """Draws 32 indices at a time, as many as an epoch of four batches has."""
    generator = torch.Generator().manual_seed(4)
    sampler = RandomSampler(Pairs(), True, 96, generator)
    return DataLoader(Pairs(), 8, sampler=sampler, num_workers=num_workers, seed=1)


def piped(length, num_workers):
    """A PipelineDataset by itself."""

    def batch_of(numbers):
        return torch.tensor([[float(n), 0.5] for n in numbers])

    builder = PipelineBuilder().add_source(ShuffledSource(length)).aggregate(3)
    return PipelineDataset(
        builder.pipe(batch_of, concurrency=num_workers + 1, output_order="input").add_sink()
    )


def unsized(num_workers, batch_size=3):
    return DataLoader(PairStream(), batch_size=batch_size, seed=1, num_workers=num_workers)


# Epochs of four batches,
sized, even = partial(shuffled, 10, drop_last=False), partial(shuffled, 12)
dropping, pipeline = partial(shuffled, 13), partial(piped, 10)
# and of more.
longer, longer_pipeline = partial(shuffled, 20), partial(piped, 20)
longer_stream = partial(unsized, batch_size=2)


class Kept(IterableDataset):
    """Keeps its own state."""

    def __init__(self):
        self.index = 0

    def __iter__(self):
        while self.index < 10:
            self.index += 1
            yield torch.tensor([float(self.index), 0.5])
        self.index = 0

    def state_dict(self):
        return {"index": self.index}

    def load_state_dict(self, state):
        self.index = state["index"]


def stateful(num_workers, batch_size=3):
    return DataLoader(Kept(), batch_size=batch_size, num_workers=num_workers)


def fit(
    loader,
    folder,
    *,
    touches_estimate=False,
    checkpoint=None,
    is_kept=True,
    saved=None,
    fails_after=None,
    validates=False,
    every=1,
    **options,
):
    """Train, and validate on the same loader if it ``validates``; the diary.

    The first run leaves a checkpoint behind ``every`` so many steps and every epoch, if it
    ``is_kept``, and one that is ``saved`` when it is over.
    """
    added = [
        ours.PipelineStatsMonitor(db_path=folder / "run.db"),
        modules.EndsByAnError(fails_after),
    ]
    is_kept = is_kept and checkpoint is None
    if is_kept:
        steps, epochs = folder / "steps", folder / "epochs"
        added += [
            callbacks.ModelCheckpoint(steps, "{step}", save_top_k=-1, every_n_train_steps=every),
            callbacks.ModelCheckpoint(
                epochs, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True
            ),
        ]
    options = {"max_epochs": NUM_EPOCHS, **options}
    trainer = modules.trainer(enable_checkpointing=is_kept, callbacks=added, **options)
    model = (modules.ValidatedDiary if validates else modules.Diary)(touches_estimate)
    with nullcontext() if fails_after is None else pytest.raises(OSError, match="no room"):
        held_out = loader if validates else None
        trainer.fit(model, loader, held_out, ckpt_path=checkpoint, **modules.SAFELY)
    if saved is not None:
        trainer.save_checkpoint(saved)
    return model.seen


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """What a training of a kind of loader sees from beginning to end, whatever its workers: made
    once for all tests that go on within it."""
    return functools.cache(
        lambda make: fit(make(1), tmp_path_factory.mktemp("whole"), is_kept=False)
    )


EPOCHS, STEPS = {}, {"max_epochs": -1, "max_steps": 4 * NUM_EPOCHS}
"""What bounds a training."""


def test_checkpoint_of_a_pipeline_resumes_at_the_next_batch(tmp_path):
    """Within an epoch, behind its last step and behind the epoch, also where Lightning forgets to
    load the loaders' states: what was trained before and after are the undisturbed run."""
    assert_exact(tmp_path, pipeline, True, 1, steps=[4, 5], epochs=[1])


@pytest.mark.parametrize(
    ("make", "options", "touches_estimate", "num_workers", "limit"),
    [
        # Nobody asks for the end: Lightning stops at len().
        (even, STEPS, True, 0, {}),
        (dropping, EPOCHS, False, 1, {}),
        # Lightning ends early: what an epoch leaves is not what the next one trains on, and an
        # index that nobody had drawn costs the generator nothing.
        (replacing, STEPS, True, 1, {"limit_train_batches": 4}),
        (longer, EPOCHS, False, 1, {"limit_train_batches": 4}),
        (longer_stream, STEPS, False, 0, {"limit_train_batches": 4}),
        (longer_pipeline, EPOCHS, True, 0, {"limit_train_batches": 4}),
    ],
)
def test_later_epochs_are_whole_and_have_their_order(
    tmp_path, make, options, touches_estimate, num_workers, limit
):
    """Wherever an epoch ends."""
    options = {"steps": [3, 4], "epochs": [0], **options, **limit}
    assert_exact(tmp_path, make, touches_estimate, num_workers, **options)


LENGTHS = {"min_size": (12, 20), "max_size": (9, 12), "max_size_cycle": (9, 12)}


@pytest.mark.parametrize(
    ("mode", "short", "num_workers"),
    [("min_size", piped, 1), ("max_size", shuffled, 1), ("max_size_cycle", piped, 0)],
)
def test_loaders_of_several_lengths_resume(tmp_path, mode, short, num_workers):
    """One that is over where the epoch is not does not begin another, unless the mode has it
    cycle, and where both are over it does so once."""

    lengths = LENGTHS[mode]

    def several(num_workers):
        pair = [short(lengths[0], num_workers), shuffled(lengths[1], num_workers)]
        return utilities.CombinedLoader(pair, mode)

    assert_exact(tmp_path, several, False, num_workers, steps=[2, 7], epochs=[0])


@pytest.mark.parametrize(
    ("make", "is_kept", "num_workers"),
    [(sized, True, 1), (unsized, False, 1), (pipeline, True, 0), (stateful, False, 0)],
)
def test_checkpoint_of_a_training_that_is_over_resumes_at_the_next_batch(
    tmp_path, make, is_kept, num_workers, undisturbed
):
    """By an error: Lightning has dropped the batch that it held back by then."""
    whole = undisturbed(make)
    for number, options in enumerate([{"fails_after": 2}, {"fails_after": 6}]):
        path = tmp_path / f"{number}.ckpt"
        options["saved"] = path
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "DataLoader.state_dict: nobody had asked")
            part = fit(make(num_workers), tmp_path / f"{number}", is_kept=is_kept, **options)
        rest = fit(make(num_workers), tmp_path / f"{number}", checkpoint=path)
        assert [batch for _, batch in part + rest] == [batch for _, batch in whole]


@pytest.mark.filterwarnings("ignore:Your `val_dataloader`'s sampler has shuffling enabled")
@pytest.mark.parametrize(("limit", "num_workers"), [(1.0, 1), (2, 0)], ids=["whole", "limited"])
def test_validation_on_the_same_loader_loses_no_batch_of_training(tmp_path, limit, num_workers):
    """In the middle of an epoch, after which the state is training's again."""
    options = {"val_check_interval": 2, "num_sanity_val_steps": 0, "limit_val_batches": limit}
    whole = fit(even(num_workers), tmp_path, validates=True, **options)
    path = tmp_path / "steps" / "step=3.ckpt"
    rest = fit(even(num_workers), tmp_path / "again", validates=True, checkpoint=path, **options)
    assert [epoch for epoch, _ in rest] == [epoch for epoch, _ in whole[3:]]
    assert rest[0] == whole[3]


@pytest.mark.parametrize(("make", "num_workers"), [(sized, 0), (unsized, 1), (pipeline, 1)])
def test_checkpoint_of_a_training_that_max_steps_ended_is_that_of_an_epoch(
    tmp_path, make, num_workers, undisturbed
):
    """Lightning counts the epoch as over."""
    path, whole = tmp_path / "saved.ckpt", undisturbed(make)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "DataLoader.state_dict: nobody had asked")
        part = fit(make(num_workers), tmp_path, is_kept=False, max_steps=2, saved=path)
    steps = {"max_steps": 4 * NUM_EPOCHS, "max_epochs": -1}
    rest = fit(make(num_workers), tmp_path / "steps", checkpoint=path, **steps)
    assert [batch for _, batch in part + rest] == [batch for _, batch in whole]
    assert [epoch for epoch, _ in rest] == [1, 1, *[2] * 4, *[3] * 4]
    with pytest.warns(UserWarning, match="begins epoch 1, and leaves out the batches .* epoch 0"):
        rest = fit(make(num_workers), tmp_path / "epochs", checkpoint=path)
    for number in range(1, NUM_EPOCHS):
        numbers = [pair[0] for epoch, batch in rest if epoch == number for pair in batch]
        assert sorted(numbers) == list(range(10)), "a whole epoch"


def assert_exact(tmp_path, make, touches_estimate, num_workers, steps, epochs, **options):
    options["touches_estimate"] = touches_estimate
    whole = fit(make(num_workers), tmp_path / "whole", **options)
    assert len(whole) == 4 * NUM_EPOCHS
    checkpoints = [(step, tmp_path / "whole" / "steps" / f"step={step}.ckpt") for step in steps] + [
        (4 * (n + 1), tmp_path / "whole" / "epochs" / f"epoch={n}.ckpt") for n in epochs
    ]
    for number, (step, path) in enumerate(checkpoints):
        seen = fit(make(num_workers), tmp_path / f"again{number}", checkpoint=path, **options)
        assert [batch for _, batch in seen] == [batch for _, batch in whole[step:]], path.name
        if make is not longer_stream:  # of which Lightning does not know that the epoch had ended
            assert seen[0][0] == whole[step][0], "the epoch's number goes on, too"


@pytest.mark.parametrize(
    ("num_workers", "batch_size", "every", "saved"),
    [*((number, 3, 1, {2: 6, 3: 9, 6: 6}) for number in (0, 1)), (1, 1, 6, {6: 6})],
)
def test_checkpoint_has_the_state_that_a_dataset_keeps(
    tmp_path, num_workers, batch_size, every, saved, monkeypatch
):
    """Also the first one, however late it is: none has to be counted but those of batches that were
    loaded before training began; also of the batch that Lightning holds back."""
    # On a busy machine taking a state may last so long by chance that the next one is left out.
    monkeypatch.setattr(user_state, "_CHEAP_NS", 10**12)
    fit(stateful(num_workers, batch_size), tmp_path, every=every)
    for step, index in saved.items():
        checkpoint = torch.load(tmp_path / "steps" / f"step={step}.ckpt", weights_only=True)
        (state,) = checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"]
        (worker,) = state["workers"]
        assert worker["num_items"] == index
        if step > 3:
            assert worker["state"] == {"index": index}
