"""Stamps: numbers that identify a sample's origin. If one changes, the cached sample is stale."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

from torch.utils.data import Subset

from ...io._cache.hashing import hash_of
from ...io._cache.opening import file_stamp

if TYPE_CHECKING:
    from collections.abc import Callable


def sample_stamps(dataset: Any, version: str) -> Callable[[int], int] | None:
    """Return the function that gives the stamp of an index, for a dataset of files: a
    ``torchvision.datasets.ImageFolder``, or another with ``samples``. None = the dataset does not
    say which files it reads.
    """
    if type(dataset) is Subset:
        inner = sample_stamps(dataset.dataset, version)
        indices = dataset.indices
        return None if inner is None else lambda index: inner(indices[index])
    samples = getattr(dataset, "samples", None)
    if not isinstance(samples, list) or not samples or not _is_path_first(samples[0]):
        return None
    return lambda index: file_stamp(samples[index][0], version, repr(samples[index][1]))


def identity_of(dataset: Any) -> str:
    """Return a string that tells datasets apart: class, length, root, ``repr`` of transforms."""
    parts = [type(dataset).__qualname__, str(len(dataset))]
    root = getattr(dataset, "root", None)
    parts.append(os.path.abspath(root) if isinstance(root, str | os.PathLike) else repr(root))
    for name in ("transform", "target_transform"):
        value = getattr(dataset, name, None)
        parts.append(re.sub(r" at 0x[0-9a-f]+", "", repr(value)))
    if getattr(dataset, "scaled", False) is True:  # of our ImageFolder: other pixels
        parts.append("scaled")
    inner = getattr(dataset, "dataset", None)
    if type(dataset) is Subset:
        parts += [identity_of(inner), str(hash_of(repr([*dataset.indices])))]
    return "\n".join(parts)


def _is_path_first(sample: Any) -> bool:
    return isinstance(sample, tuple) and len(sample) == 2 and isinstance(sample[0], str)
