"""The loader inside Lightning: torch's samples, rebuilt with its options, no thread left."""

from __future__ import annotations

import os

import pytest
import torch
import torch.utils.data as torch_data
from support.datasets import Made, Points
from support.later import LIGHTNINGS_WARNINGS, later
from support.loaders import assert_threads_end

from spdl_torch import DataLoader, PipelineDataset
from spdl_torch.pipeline import PipelineBuilder

lightning, modules = later("lightning", "support.lightning_modules")

pytestmark = LIGHTNINGS_WARNINGS


def fit(loader_class, monkeypatch, *, seed_workers, **options):
    """What a two-epoch fit saw, and the state of the global generator after it."""
    # Remembered by monkeypatch, so that seed_everything's own settings are undone.
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    monkeypatch.setenv("PL_SEED_WORKERS", "0")
    lightning.seed_everything(7, workers=seed_workers, verbose=False)
    module = modules.Diary()
    options = {"batch_size": 3, "num_workers": 2, **options}
    loaders = loader_class(Points(14), shuffle=True, **options), loader_class(Points(5), **options)
    modules.trainer().fit(module, *loaders)
    assert_threads_end()  # though Lightning never runs a sized train loader to its end
    return module.seen, torch.get_rng_state().tolist()


@pytest.mark.parametrize(("persistent", "seeds"), [(True, True), (False, True), (False, False)])
def test_fit_sees_torchs_samples_when_seeded(persistent, seeds, monkeypatch):
    """seed_everything(workers=True) reseeds inside workers; the trainer must not notice. No worker
    is left."""
    options = {"seed_workers": seeds, "persistent_workers": persistent}
    ours = fit(DataLoader, monkeypatch, **options)
    assert ours == fit(torch_data.DataLoader, monkeypatch, **options)


PLACES = Made(lambda _: torch.tensor([float(os.getpid())]), 2)
"""Samples are the process that made them."""


@pytest.mark.parametrize("persistent_workers", [True, False])
def test_validation_keeps_its_workers(persistent_workers):
    """From epoch to epoch of a fit, the check before the first one included."""
    module = modules.Diary()
    options = {"num_workers": 1, "persistent_workers": persistent_workers}
    modules.trainer(max_epochs=3).fit(module, DataLoader(Points(4)), DataLoader(PLACES, **options))
    places = [place for hook, _, [[place]] in module.seen if hook == "val"]
    assert len(places) == (1 + 3) * 2
    assert os.getpid() not in places
    assert len(set(places)) == (1 if persistent_workers else 4)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # Accelerate's
@pytest.mark.parametrize("persistent_workers", [True, False])
@pytest.mark.parametrize("library", ["lightning", "accelerate"])
def test_prepared_loader_keeps_its_workers(library, persistent_workers):
    """Around ours; from loop to loop."""
    loader = DataLoader(PLACES, num_workers=1, persistent_workers=persistent_workers)
    if library == "lightning":
        prepared = lightning.Fabric(accelerator="cpu", devices=1).setup_dataloaders(loader)
    else:
        prepares = pytest.importorskip("spdl_torch.accelerate", exc_type=ImportError)
        prepared = prepares.Accelerator(cpu=True).prepare(loader)
    first, second = ({place.item() for place in prepared} for _ in range(2))
    assert len(first) == len(second) == 1
    assert os.getpid() not in first
    assert (first == second) is persistent_workers


@pytest.mark.parametrize("is_made_in_a_hook", [False, True])
def test_predict_rebuilds_the_loader_with_its_class_and_options(is_made_in_a_hook):
    """Lightning wraps the batch sampler for predict, and replays the recorded arguments of loaders
    that were made in a hook; nothing of ours is lost on the way."""
    loader = DataLoader(Points(7), batch_size=2, num_workers=2, stats=False)

    class WithLoader(modules.Diary):
        def predict_dataloader(self):
            return DataLoader(Points(7), batch_size=2, num_workers=2, stats=False)

    engine = modules.trainer()
    given = [WithLoader()] if is_made_in_a_hook else [modules.Diary(), loader]
    assert torch.cat(engine.predict(*given)).flatten().tolist() == list(range(7))
    rebuilt = engine.predict_dataloaders
    assert rebuilt is not loader
    assert type(rebuilt) is DataLoader
    assert rebuilt.batch_sampler.seen_batch_indices == [[0, 1], [2, 3], [4, 5], [6]]
    assert (rebuilt.stats, rebuilt.num_workers, rebuilt.prefetch_factor) == (False, 2, 2)
    assert (rebuilt.device, rebuilt.isolation, rebuilt.on_error) == (None, "auto", "raise")


def test_overfit_batches_turns_shuffling_off():
    """overfit_batches rebuilds the loader around a SequentialSampler."""
    module = modules.Diary()
    loader = DataLoader(Points(9), batch_size=2, shuffle=True, num_workers=2)
    with pytest.warns(UserWarning, match="(?s)overfit.*shuffling"):
        modules.trainer(overfit_batches=2).fit(module, loader, DataLoader(Points(2)))
    trained = [batch for hook, _, batch in module.seen if hook == "train"]
    assert trained == [[[0], [1]], [[2], [3]]] * 2


def streamed_points(length):
    """The points through a pipeline, batched in it, as an iterable dataset."""
    builder = PipelineBuilder().add_source(range(length))
    builder.pipe(lambda n: torch.tensor([float(n)]), name="point", output_order="input")
    return PipelineDataset(builder.aggregate(3).pipe(torch.stack).add_sink())


@pytest.mark.parametrize("wrap", [None, torch_data.DataLoader, DataLoader])
def test_fit_sees_every_item_when_the_dataset_is_a_pipeline(wrap):
    """By itself and in either loader, with len() known, and with the loop cut short."""
    loaders = [streamed_points(14), streamed_points(5)]
    if wrap is not None:
        loaders = [wrap(loader, batch_size=None) for loader in loaders]
    module = modules.Diary()
    modules.trainer(num_sanity_val_steps=0).fit(module, *loaders)
    for epoch in (0, 1):
        for what, length in (("train", 14), ("val", 5)):
            seen = [points for w, e, points in module.seen if (w, e) == (what, epoch)]
            assert [p for points in seen for [p] in points] == list(range(length))
    cut = modules.Diary()
    modules.trainer(max_epochs=1, limit_train_batches=2, limit_val_batches=0).fit(cut, *loaders)
    assert [seen[2] for seen in cut.seen] == [[[0], [1], [2]], [[3], [4], [5]]]
