"""Scripts that make their loaders by the name ``torch.utils.data.DataLoader``, as torchvision's
reference scripts and timm's do: the one line that changes, and what they then get."""

from __future__ import annotations

import pytest
import torch
import torch.utils.data
from torch.utils.data import DataLoader as TorchDataLoader
from torchvision import datasets
from torchvision.transforms import v2

import spdl_torch

NUM_CLASSES, NUM_SAMPLES = 4, 16


@pytest.fixture
def changed(monkeypatch):
    """The line that changes."""
    monkeypatch.setattr(torch.utils.data, "DataLoader", spdl_torch.DataLoader)


def pictures(*transforms):
    """Pictures that Pillow makes, which depend on the index alone."""
    steps = [*transforms, v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True)]
    return datasets.FakeData(NUM_SAMPLES, (3, 40, 40), NUM_CLASSES, v2.Compose(steps))


mix = v2.RandomChoice([v2.MixUp(num_classes=NUM_CLASSES), v2.CutMix(num_classes=NUM_CLASSES)])


def mixed(samples):
    """Whole batches, mixed."""
    return mix(*torch.utils.data.default_collate(samples))


def run_train_py(num_workers):
    """Every batch of two epochs by the calls of torchvision's script, as numbers."""
    torch.manual_seed(0)
    train = pictures(v2.RandomResizedCrop(32), v2.RandomHorizontalFlip(), v2.RandomErasing())
    val = pictures(v2.CenterCrop(32))
    train_sampler, val_sampler = (
        torch.utils.data.distributed.DistributedSampler(data, 1, 0, shuffle=data is train)
        for data in (train, val)
    )
    options = {"batch_size": 4, "num_workers": num_workers, "pin_memory": False}
    train_loader = torch.utils.data.DataLoader(
        train, sampler=train_sampler, collate_fn=mixed, **options
    )
    val_loader = torch.utils.data.DataLoader(val, sampler=val_sampler, **options)
    trained, validated = [], []
    for epoch in range(2):
        train_sampler.set_epoch(epoch)
        for seen, loader in ((trained, train_loader), (validated, val_loader)):
            seen += [(images.sum().item(), targets.tolist()) for images, targets in loader]
    return trained, validated, train_loader


def test_torchvisions_script_gets_our_loaders(changed):
    """Mixed and augmented batches are the same for any number of workers."""
    trained, validated, loader = run_train_py(2)
    assert type(loader) is spdl_torch.DataLoader
    assert run_train_py(0)[:2] == (trained, validated)
    assert len(trained) == len(validated) == 8
    assert all(abs(sum(row) - 1) < 1e-5 for _, targets in trained for row in targets)  # mixed
    assert trained[:4] != trained[4:]
    assert validated[:4] == validated[4:]


@pytest.fixture
def timm_data():
    """timm's loaders."""
    return pytest.importorskip("timm.data", reason="timm is not installed")


def by_timm(timm_data, num_workers, **options):
    """What ``create_loader`` makes of the same pictures."""
    dataset = datasets.FakeData(NUM_SAMPLES, (3, 40, 40), NUM_CLASSES)
    options |= {"input_size": (3, 32, 32), "batch_size": 4, "device": torch.device("cpu")}
    return timm_data.create_loader(dataset, num_workers=num_workers, **options)


@pytest.mark.parametrize("use_prefetcher", [False, True])
def test_timms_evaluation_is_that_of_torchs_loader(timm_data, changed, monkeypatch, use_prefetcher):
    """To the bit, with timm's own transforms and collate functions, also with its prefetcher."""
    ours = by_timm(timm_data, 2, use_prefetcher=use_prefetcher)
    assert type(ours.loader if use_prefetcher else ours) is spdl_torch.DataLoader
    monkeypatch.setattr(torch.utils.data, "DataLoader", TorchDataLoader)
    torchs = by_timm(timm_data, 0, use_prefetcher=use_prefetcher)
    for _ in range(2):  # timm keeps its workers
        for (images, targets), (expected, expected_targets) in zip(ours, torchs, strict=True):
            assert torch.equal(images, expected)
            assert torch.equal(targets, expected_targets)


def test_timms_training_does_not_depend_on_the_number_of_workers(timm_data, changed):
    """Crops, flips and RandAugment draw from the samples' own streams, in spite of the seeds that
    timm gives to its workers."""

    def batches(num_workers):
        torch.manual_seed(0)
        options = {"is_training": True, "auto_augment": "rand-m9-mstd0.5", "use_prefetcher": False}
        loader = by_timm(timm_data, num_workers, **options)
        return [(images.sum().item(), targets.tolist()) for images, targets in loader]

    assert batches(1) == batches(2) == batches(0)
    assert len(batches(2)) == 4
