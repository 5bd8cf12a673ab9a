"""Lightning's checkpoints, of every kind and saved in every hook: what is trained after one is what
would have been trained without it."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from datetime import timedelta
from functools import partial

import pytest
import torch
from support.datasets import Divided, Drawn, DrawnStream, ShuffledSource, StatefulStream
from support.later import LIGHTNINGS_WARNINGS, later
from support.loaders import DataLoader
from torch.utils.data import DataLoader as TorchLoader, DistributedSampler, RandomSampler

from spdl_torch import PipelineDataset
from spdl_torch.data.sources import ListSource
from spdl_torch.loader.checkpoint import user_state
from spdl_torch.pipeline import PipelineBuilder

_, modules, callbacks, utilities, ours = later(
    *("lightning", "support.lightning_modules", "lightning.pytorch.callbacks"),
    *("lightning.pytorch.utilities", "spdl_torch.lightning"),
)

pytestmark = LIGHTNINGS_WARNINGS

LENGTH = 8
"""Three batches of three, the last of which is smaller: an epoch, of which a training has three."""
OURS = partial(DataLoader, seed=1, isolation="thread")


def plain(num_workers, loader=OURS):
    return loader(Drawn(LENGTH), 3, num_workers=num_workers)


def shuffled(num_workers, length=11, *, drop_last=True):
    """If all batches are full, whoever draws them need not ask the sampler for its end."""
    generator = torch.Generator().manual_seed(4)
    options = {"shuffle": True, "generator": generator, "drop_last": drop_last}
    return OURS(Drawn(length), 3, num_workers=num_workers, **options)


def replacing(num_workers):
    """Draws 32 indices at a time, more than an epoch has."""
    sampler = RandomSampler(Drawn(10), True, 96, torch.Generator().manual_seed(4))
    return OURS(Drawn(10), 3, sampler=sampler, num_workers=num_workers)


def divided(num_workers):
    """Its order is that of the epoch, which Lightning names."""
    sampler = DistributedSampler(range(LENGTH), num_replicas=1, rank=0)
    return OURS(Drawn(LENGTH), 3, sampler=sampler, num_workers=num_workers)


def unsized(num_workers, loader=OURS, length=LENGTH, kind=DrawnStream):
    return loader(kind(length), 3, num_workers=num_workers)


def pipeline(num_workers, length=LENGTH, source=ShuffledSource):
    """A PipelineDataset by itself."""

    def batch_of(numbers):
        return torch.tensor([[number, 0] for number in numbers])

    builder = PipelineBuilder().add_source(source(length)).aggregate(3)
    builder.pipe(batch_of, concurrency=num_workers + 1, output_order="input")
    return PipelineDataset(builder.add_sink())


def piped(num_workers):
    """One in a loader; another source, whose passes differ, too."""
    dataset = pipeline(0, source=lambda length: ListSource(range(length)).shuffle(1))
    return OURS(dataset, batch_size=None, num_workers=num_workers)


def stateful(num_workers, batch_size=3):
    """In a process, where there is a worker."""
    dataset = StatefulStream(LENGTH)
    return DataLoader(dataset, batch_size=batch_size, num_workers=num_workers, seed=1)


def several(mode, short, lengths, num_workers):
    """Loaders of two lengths."""
    loaders = [short(num_workers, lengths[0]), shuffled(num_workers, lengths[1])]
    return utilities.CombinedLoader(loaders, mode)


sized = partial(shuffled, length=LENGTH, drop_last=False)
even = partial(shuffled, length=9)
longer, longer_stream = partial(shuffled, length=15), partial(unsized, length=15)
longer_pipeline = partial(pipeline, length=15)

EPOCHS = {"max_epochs": 3}
STEPS = {"max_epochs": -1, "max_steps": 9}
AFTER, WITHIN = {"check_val_every_n_epoch": 1}, {"val_check_interval": 2}
"""What bounds a training, and where it is validated, if it is."""


def fit(
    loader,
    saving=(),
    *,
    checkpoint=None,
    saved=None,
    fails_after=None,
    held_out=None,
    touches_estimate=False,
    **options,
):
    """Train; return the batches that the model has seen, each with its epoch. A checkpoint may be
    ``saved`` when it is over."""
    if held_out is None and options.keys() & {*AFTER, *WITHIN}:
        held_out = TorchLoader(torch.zeros(6, 2), 3)
    trainer = modules.trainer(
        **{"num_sanity_val_steps": 0, **EPOCHS, **options},
        enable_checkpointing=any(isinstance(each, callbacks.ModelCheckpoint) for each in saving),
        callbacks=[*saving, modules.EndsByAnError(fails_after)],
    )
    model = modules.Diary(touches_estimate)
    with nullcontext() if fails_after is None else pytest.raises(OSError, match="no room"):
        trainer.fit(model, loader, held_out, ckpt_path=checkpoint, **modules.SAFELY)
    if saved is not None:
        trainer.save_checkpoint(saved)
    return [(epoch, batch) for hook, epoch, batch in model.seen if hook == "train"]


@pytest.fixture(scope="module")
def undisturbed():
    """What a training of a kind of loader sees, whatever its workers: made once for all tests."""
    return functools.cache(lambda make: fit(make(1)))


def assert_rest_is_trained(whole, saved, make, options):
    """By trainings that begin with each checkpoint, saved after so many batches."""
    assert len(whole) == 9
    assert saved
    for path, num_trained in saved:
        seen = fit(make(), checkpoint=path, **options)
        rest = whole[num_trained:]
        assert [batch for _, batch in seen] == [batch for _, batch in rest], path.name
        # Counting steps, without a length, Lightning does not know that an epoch was over.
        knows = "epoch_end" not in path.name and path.parent.name != "epochs"
        if knows or "max_steps" not in options:
            assert seen == rest, path.name


ESTIMATE = {"touches_estimate": True}
WAYS = [
    (plain, 0, EPOCHS | WITHIN),
    (sized, 2, EPOCHS | AFTER | ESTIMATE),
    (unsized, 1, STEPS | AFTER),
    (even, 0, STEPS | WITHIN | ESTIMATE),
    (piped, 0, EPOCHS | AFTER),
    (piped, 1, STEPS | WITHIN),
    (divided, 2, EPOCHS),
    (partial(unsized, kind=Divided), 1, STEPS),
]
PLACES = [[2, 3, 4], [3, 4, 2], [4, 2, 3]]
"""Within an epoch, at its end, and behind the next one's first batch; each comes first."""


@pytest.mark.parametrize(
    ("make", "num_workers", "options", "places"),
    [(*way, PLACES[number % 3]) for number, way in enumerate(WAYS)],
)
def test_checkpoint_of_any_hook_resumes_at_next_batch(tmp_path, make, num_workers, options, places):
    """Also within a step, which Lightning makes again. No callback of ours is given to it."""
    saving = modules.SavesInHooks(tmp_path, places)
    whole = fit(make(num_workers), [saving], **options)
    assert_rest_is_trained(whole, saving.saved, lambda: make(num_workers), options)


LIMIT = {"limit_train_batches": 3}


@pytest.mark.parametrize(
    ("make", "num_workers", "options"),
    [
        (pipeline, 1, EPOCHS | ESTIMATE),
        # Lightning ends early: what an epoch leaves is not what the next one trains on, and an
        # index that nobody had drawn costs the generator nothing.
        (replacing, 1, STEPS | LIMIT | ESTIMATE),
        (longer, 1, EPOCHS | LIMIT),
        (longer_stream, 0, STEPS | LIMIT),
        (longer_pipeline, 0, EPOCHS | LIMIT | ESTIMATE),
        # Of two loaders one that is over does not begin another epoch, unless the mode has it
        # cycle, and where both are over it does so once.
        (partial(several, "min_size", pipeline, (9, 15)), 1, EPOCHS),
        (partial(several, "max_size", shuffled, (6, 9)), 1, EPOCHS),
        (partial(several, "max_size_cycle", pipeline, (6, 9)), 0, EPOCHS),
    ],
)
def test_later_epochs_are_whole_and_have_their_order(tmp_path, make, num_workers, options):
    """Wherever an epoch ends, and beside the callback of ours that logs and records."""
    kinds = "on_train_batch_end", "on_train_epoch_end"
    monitor = ours.PipelineStatsMonitor(db_path=tmp_path / "run.db")
    saving = modules.SavesInHooks(tmp_path, PLACES[0], kinds)
    whole = fit(make(num_workers), [monitor, saving], logger=False, **options)
    assert_rest_is_trained(whole, saving.saved, lambda: make(num_workers), options)


@pytest.mark.parametrize(("make", "num_workers", "options"), [*WAYS[:3], WAYS[4]])
def test_checkpoint_of_any_kind_resumes_at_the_next_batch(tmp_path, make, num_workers, options):
    """Every few steps, epochs or seconds, before and after a validation, and the last one."""

    def kind(name, **when):
        folder = tmp_path / name
        return callbacks.ModelCheckpoint(folder, "{step}-{epoch}", save_top_k=-1, **when)

    kinds = [
        kind("steps", every_n_train_steps=3),
        kind("last", every_n_train_steps=4, save_last=True),
        kind("epochs", every_n_epochs=1, save_on_train_epoch_end=True),
        kind("after", every_n_epochs=1, save_on_train_epoch_end=False, mode="max"),
        kind("seconds", train_time_interval=timedelta(0)),
    ]
    whole = fit(make(num_workers), kinds, **options)
    saved = [(path, step_of(path)) for path in sorted(tmp_path.rglob("*.ckpt"))]
    saved = [(path, step) for path, step in saved if 3 <= step <= 5 or path.stem == "last"]
    assert {str(path.parent) for path, _ in saved} == {each.dirpath for each in kinds}
    assert_rest_is_trained(whole, saved, lambda: make(num_workers), options)


def step_of(path):
    return torch.load(path, weights_only=False)["global_step"]


@pytest.mark.parametrize(("make", "num_workers"), [(plain, 2), (unsized, 0)])
@pytest.mark.parametrize("when", ["every_n_train_steps", "every_n_epochs"])
def test_what_follows_an_epochs_last_step_is_torchs(tmp_path, when, make, num_workers):
    """Each with a checkpoint of its own, saved after as many steps as an epoch has, or after it."""
    options = {when: 3 if when == "every_n_train_steps" else 1, "save_top_k": -1}
    seen = []
    for name, loader in (("theirs", TorchLoader), ("ours", OURS)):
        saving = callbacks.ModelCheckpoint(tmp_path / name, "{step}", **options)
        fit(make(num_workers, loader), [saving], max_epochs=2)
        for step in (3, 6):
            checkpoint = tmp_path / name / f"step={step}.ckpt"
            trained = fit(make(num_workers, loader), checkpoint=checkpoint)
            seen.append([(epoch, [number for number, _ in batch]) for epoch, batch in trained])
    assert seen[:2] == seen[2:]
    assert [len(each) for each in seen] == [6, 3, 6, 3]


def test_trainer_gets_its_callback_once(tmp_path):
    """However many loaders, epochs and calls of ``fit`` there are, and none for torch's loader."""
    trainer = modules.trainer(default_root_dir=tmp_path)
    before = len(trainer.callbacks)
    trainer.fit(modules.Diary(), plain(0, TorchLoader))
    assert len(trainer.callbacks) == before
    for _ in range(2):
        trainer.fit(modules.Diary(), [plain(0), shuffled(0)])
    assert len(trainer.callbacks) == before + 1


@pytest.mark.filterwarnings("ignore:DataLoader.state_dict. nobody had asked")
@pytest.mark.parametrize(
    ("make", "num_workers"), [(sized, 1), (unsized, 1), (pipeline, 0), (stateful, 0)]
)
def test_checkpoint_of_a_training_that_is_over_resumes(tmp_path, make, num_workers, undisturbed):
    """By an error: Lightning has dropped the batch that it held back by then. By its steps: it
    counts the epoch as over, and a training of so many epochs begins the next one."""
    for number, end in enumerate([{"fails_after": 2}, {"fails_after": 5}, {"max_steps": 2}]):
        path = tmp_path / f"{number}.ckpt"
        part = fit(make(num_workers), saved=path, **end)
        is_by_steps = "max_steps" in end
        rest = fit(make(num_workers), checkpoint=path, **(STEPS if is_by_steps else EPOCHS))
        assert [batch for _, batch in part + rest] == [batch for _, batch in undisturbed(make)]
    if make is not stateful:
        assert [epoch for epoch, _ in rest] == [1, *[2] * 3, *[3] * 3]
        message = "begins epoch 1, and leaves out the batches .* epoch 0"
        with pytest.warns(UserWarning, match=message):
            rest = fit(make(num_workers), checkpoint=path)
        for number in (1, 2):
            numbers = [pair[0] for epoch, batch in rest if epoch == number for pair in batch]
            assert sorted(numbers) == list(range(LENGTH)), "a whole epoch"


@pytest.mark.filterwarnings("ignore:Your `val_dataloader`'s sampler has shuffling enabled")
@pytest.mark.parametrize(
    ("limit", "num_workers", "is_watched"), [(1.0, 1, False), (2, 0, True), (1.0, 0, True)]
)
def test_validation_on_the_same_loader_loses_no_batch(tmp_path, limit, num_workers, is_watched):
    """In the middle of an epoch, after which the state is training's again; also beside the
    callback of ours that logs and records."""
    steps = {"every_n_train_steps": 1, "save_top_k": -1}
    saving = [callbacks.ModelCheckpoint(tmp_path, "{step}", **steps)]

    def run(saving=(), **more):
        loader = shuffled(num_workers, length=12)
        monitor = ours.PipelineStatsMonitor(db_path=tmp_path / "run.db")
        options = {"held_out": loader, "limit_val_batches": limit, **WITHIN, **more}
        return fit(loader, [*[monitor] * is_watched, *saving], logger=False, **options)

    whole, rest = run(saving), run(checkpoint=tmp_path / "step=3.ckpt")
    assert [epoch for epoch, _ in rest] == [epoch for epoch, _ in whole[3:]]
    assert rest[0] == whole[3]


@pytest.mark.parametrize(
    ("num_workers", "batch_size", "every", "saved"),
    [*((number, 3, 1, {1: 3, 2: 6, 5: 6}) for number in (0, 1)), (1, 1, 6, {6: 6})],
)
def test_checkpoint_has_the_state_that_a_dataset_keeps(
    tmp_path, num_workers, batch_size, every, saved, monkeypatch
):
    """Also the first one, however late it is: none has to be counted but those of batches that were
    loaded before training began; also of the batch that Lightning holds back."""
    # On a busy machine taking a state may last so long by chance that the next one is left out.
    monkeypatch.setattr(user_state, "_CHEAP_NS", 10**12)
    saving = callbacks.ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=every)
    fit(stateful(num_workers, batch_size), [saving])
    for step, index in saved.items():
        checkpoint = torch.load(tmp_path / f"step={step}.ckpt", weights_only=True)
        (state,) = checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"]
        (worker,) = state["workers"]
        assert worker["num_items"] == index
        if step > 2:
            assert worker["state"] == {"next_item": index}
