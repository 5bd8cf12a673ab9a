"""The report's action works for the dataset: each way to less work is followed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torchvision
from PIL import Image
from support.datasets import Divided, Made
from support.readings import reading, stage
from torch.utils.data import Dataset
from torchvision import transforms

from spdl_torch import DataLoader, ImageFolder
from spdl_torch.data import cached
from spdl_torch.loader.stats.stats import with_remarks_of
from spdl_torch.observe import Probes, make_report
from spdl_torch.observe.verdict.advice import AT_ONCE, AT_ONCE_OR_CACHED, CACHED


def action_for(dataset, num_calls=1000, **changes):
    """What a report advises where the dataset takes all cores; a call makes a sample or a batch."""
    load = stage("fetch", busy=0.97, threads=2, num_tasks=num_calls, num_delivered=100)
    probes = Probes(run_delay_ratio=0.4, num_cores=2, cores_used=2.0, **changes)
    report = make_report(reading(0.9, load), probes, pooled=("fetch", "collate"))
    return with_remarks_of(dataset, report).verdict.action


def at_once(make):
    """Samples that a function makes, whole batches in one call."""
    dataset = Made(make, 8)
    dataset.__getitems__ = lambda indices: [dataset[index] for index in indices]
    return dataset


class WithoutLength(Dataset):
    """Samples of which nobody knows the number."""

    def __getitem__(self, index):
        return index


def noisy(index):
    return index + torch.rand(())


def test_cache_is_advised_in_the_form_that_works_for_random_samples():
    """Around the dataset itself it would raise."""
    assert action_for(Made(noisy, 8)).endswith(f"less work for each item{AT_ONCE_OR_CACHED}.")
    assert action_for(at_once(noisy), num_calls=100).endswith(f"for each item{CACHED}.")
    with pytest.raises(ValueError, match=r"Pass the random part as cached\(\.\.\., transform="):
        list(cached(Made(noisy, 8)))
    for dataset in (cached(Made(float, 8), transform=noisy), at_once(noisy)):
        assert sum(len(batch) for batch in DataLoader(dataset, batch_size=4)) == 8


def test_no_cache_is_advised_where_cached_refuses_the_dataset():
    """A stream has no indices to read at once either."""
    assert action_for(WithoutLength()).endswith(f"less work for each item{AT_ONCE}.")
    assert action_for(WithoutLength(), num_calls=100).endswith("less work for each item.")
    assert action_for(Divided(8)).endswith("less work for each item.")
    for dataset in (WithoutLength(), Divided(8)):
        with pytest.raises(TypeError, match="expected a map-style dataset"):
            cached(dataset)


@pytest.mark.parametrize("persistent", [False, True])
def test_persistent_workers_are_not_advised_where_they_are_on(persistent):
    """Longer epochs are."""
    loader = DataLoader(range(8), num_workers=1, persistent_workers=persistent)
    list(loader)
    slow = reading(0.5, stage("fetch", busy=0.1))
    report = make_report(slow, Probes(), pooled=("fetch", "collate"))
    action = with_remarks_of(range(8), report, loader.report().traits).verdict.action
    assert action.startswith("Use longer epochs")
    assert ("persistent_workers" in action) is not persistent
    loader.close()


def test_torchvisions_image_folder_is_told_of_ours(tmp_path):
    """Whatever else is advised; with a loader of the user's own, ours would be no faster."""
    (tmp_path / "class").mkdir()
    for number in range(4):
        Image.new("RGB", (40, 30), (50 * number, 9, 9)).save(tmp_path / "class" / f"{number}.png")
    transform = transforms.Compose([transforms.RandomResizedCrop(8), transforms.ToTensor()])
    theirs = torchvision.datasets.ImageFolder(tmp_path, transform)
    advice = "First import ImageFolder from spdl_torch: it makes the same samples, faster."
    assert action_for(theirs).endswith(advice)
    assert advice in action_for(theirs, gil_seconds=6e-3)
    ours = ImageFolder(theirs.root, theirs.transform)
    assert ours.samples == theirs.samples
    assert advice not in action_for(ours)
    assert [len(images) for images, _ in DataLoader(ours, batch_size=2)] == [2, 2]
    own = torchvision.datasets.ImageFolder(tmp_path, transform, loader=Image.open)
    assert advice not in action_for(own)


@pytest.mark.parametrize(
    ("num_failures", "microseconds", "is_advised"), [(0, 40, True), (0, 60, False), (1, 40, False)]
)
def test_reading_at_once_is_advised_where_a_sample_takes_no_time(
    num_failures, microseconds, is_advised
):
    """On average, of a thousand that were made."""
    good_ns = (1000 - num_failures) * microseconds * 1000
    load = replace(stage("fetch", busy=0.97), num_failures=num_failures, good_ns=good_ns)
    report = make_report(reading(0.9, load), Probes(), pooled=("fetch", "collate"))
    remarks = with_remarks_of(Made(float), report, ["one by one"]).verdict.remarks
    said = [each for each in remarks if "If the dataset has __getitems__(indices)" in each]
    assert len(said) == is_advised
