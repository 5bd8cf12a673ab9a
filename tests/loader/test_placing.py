"""Workers are threads where that is known to be safe, and processes elsewhere, with the reason."""

from functools import lru_cache, partial

import numpy as np
import pytest
import torch
from PIL import Image
from support.datasets import Images, SafeIndices
from support.inside import placement_of
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset
from torchvision import transforms as T
from torchvision.datasets.folder import pil_loader
from torchvision.transforms import functional as F, v2

from spdl_torch import DataLoader, DistributedSampler, ImageFolder, PipelineDataset
from spdl_torch.data import bucket, mix, pack
from spdl_torch.loader.placing import is_stateless
from spdl_torch.pipeline import PipelineBuilder


def images(**members):
    """Of a user's class."""
    return type("Mine", (Images,), members)(8)


X = torch.arange(8)
SAFE = images(thread_safe=True)
KNOWN = {
    "TensorDataset": TensorDataset(X, X),
    "Subset": Subset(TensorDataset(X), [1, 2, 3]),
    "ConcatDataset": ConcatDataset([TensorDataset(X), Subset(TensorDataset(X), [4])]),
    "list": list(range(8)),
    "range": range(8),
    "array": np.arange(8),
    "tensor": X,
    "declared": SAFE,
    "Subset of declared": Subset(SAFE, [1, 2, 3]),
    "ConcatDataset of declared": ConcatDataset([SAFE] * 2),
    "a property that says so": images(thread_safe=property(lambda self: True)),
    "a mixture": mix({"a": range(8), "b": SAFE}),
    "packs": pack(SAFE, 4, size_of=[1] * 8),
    "buckets": bucket([[1], [2, 3]], 4, size_of=[1, 2]),
}
PIPELINE = PipelineDataset(PipelineBuilder().add_source(range(8)).add_sink())
UNKNOWN = {
    "a user's class": (Images(8), "Images"),
    "a wrapper of a safe one": (images(__getattr__=lambda self, name: getattr(SAFE, name)), "Mine"),
    "subclass of a safe one": (type("Mine", (SafeIndices,), {})(8), "Mine"),
    "a pipeline": (PIPELINE, "PipelineDataset"),
    "a mixture with it": (mix({"a": SAFE, "b": Images(8)}), "Images"),
    "buckets": (bucket([[1]], 4, size_of=[1], collate_fn=list), "collate_fn=list"),
    "Subset of it": (Subset(Images(8), [1, 2]), "Images"),
    "a later class of ours": (images(__module__="spdl_torch.data.later"), "Mine"),
    "subclass of TensorDataset": (type("Mine", (TensorDataset,), {})(X), "Mine"),
    "a property that fails": (images(thread_safe=property(lambda self: {}["no"])), "Mine"),
    "a part of a StackDataset": (StackDataset(a=TensorDataset(X), b=Images(8)), "Images"),
    "collate_fn": (range(8), "collate_fn=list"),
    "worker_init_fn": (range(8), "worker_init_fn=id"),
}
FUNCTIONS = {"collate_fn": {"collate_fn": list}, "worker_init_fn": {"worker_init_fn": id}}


@pytest.mark.parametrize("kind", KNOWN)
def test_workers_are_threads_where_that_is_known_to_be_safe(kind):
    """The class is known, or the dataset says so."""
    placement = placement_of(DataLoader(KNOWN[kind], num_workers=2))
    assert (placement.num_processes, placement.remedy) == (0, "")


@pytest.mark.parametrize("kind", UNKNOWN)
def test_workers_are_processes_elsewhere(kind):
    """The report says why, and what would put them on threads; that does."""
    (dataset, culprit), options = UNKNOWN[kind], FUNCTIONS.get(kind, {})
    placement = placement_of(DataLoader(dataset, num_workers=2, **options))
    assert placement.num_processes == 2
    assert f"in 2 processes: {culprit} is not known to be safe on threads" in str(placement)
    assert 'thread_safe = True in the dataset or isolation="thread"' in placement.remedy
    loader = DataLoader(dataset, num_workers=2, isolation="thread", **options)
    assert placement_of(loader).num_processes == 0


def test_dataset_that_says_that_it_is_not_safe_is_believed():
    """Its own words are the reason."""
    placement = placement_of(DataLoader(images(thread_safe=False), num_workers=2))
    assert placement.num_processes == 2
    assert "Mine says thread_safe = False" in placement.reason


def test_our_own_datasets_load_on_threads(tmp_path):
    """They are made for it, with transforms that keep no state: torchvision's."""
    (tmp_path / "a").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "a" / "0.png")
    dataset = ImageFolder(str(tmp_path), transform=T.ToTensor())
    sampler = DistributedSampler(len(dataset), num_replicas=1, rank=0)
    loader = DataLoader(dataset, sampler=sampler, num_workers=1)
    assert placement_of(loader).num_processes == 0
    dataset.transform = np.array
    placement = placement_of(DataLoader(Subset(dataset, [0]), num_workers=1))
    assert placement.num_processes == 1
    assert "transform=array is not known to be safe on threads" in placement.reason


LABELS = {"labels": 1}
STATELESS = {
    "none": None,
    "a function of torchvision": F.pil_to_tensor,
    "a recipe": v2.Compose([v2.RandomResizedCrop(4), v2.ToDtype({torch.Tensor: torch.float32})]),
    "an older recipe": T.Compose([T.RandomApply([T.ColorJitter(0.1)]), T.Normalize([0.0], [1.0])]),
    "Sequential": torch.nn.Sequential(v2.AutoAugment(), v2.RandomChoice([v2.Identity()])),
    "labels found by torchvision": v2.SanitizeBoundingBoxes(),
    "torchvision's loader": pil_loader,
}
KEEPING = {
    "lambda": T.Lambda(len),
    "v2's lambda": v2.Compose([v2.RandomOrder([v2.Lambda(len)])]),
    "labels found by a function": v2.SanitizeBoundingBoxes(labels_getter=LABELS.get),
    "subclass of Sequential": type("Mine", (torch.nn.Sequential,), {})(v2.Identity()),
    "subclass of a transform": type("Mine", (v2.Identity,), {})(),
    "another module": torch.nn.Sequential(torch.nn.BatchNorm2d(3)),
    "a method": LABELS.get,
    "a wrapped loader": lru_cache(pil_loader),
    "partial": partial(F.resize, size=[4]),
    "forward replaced": v2.Identity(),
}
KEEPING["forward replaced"].forward = LABELS.get
KEEPING["hook"] = v2.Identity()
KEEPING["hook"].register_forward_hook(print)


@pytest.mark.parametrize("kind", [*STATELESS, *KEEPING])
def test_only_transforms_of_libraries_alone_keep_no_state(kind):
    """Whatever a function of the user's is inside of may keep some."""
    assert is_stateless((STATELESS | KEEPING)[kind]) is (kind in STATELESS)
