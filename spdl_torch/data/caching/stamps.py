"""Stamps: numbers that identify a sample's origin. If one changes, the cached sample is stale."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

from torch.utils.data import Subset

from ...io._cache.hashing import hash_of
from ...io._cache.opening import file_stamp
from ...io._remote import is_url
from ..sources import TarShards

if TYPE_CHECKING:
    from collections.abc import Callable


def sample_stamps(dataset: Any, identity: str, *, is_checked: bool) -> Callable[[int], int] | None:
    """Return the function that gives the stamp of an index, for a dataset of files: a
    ``torchvision.datasets.ImageFolder``, or another with ``samples``. None = the dataset does not
    say which files it reads.

    is_checked: whether the stamp is another when the file has changed.
    """
    if type(dataset) is Subset:
        inner = sample_stamps(dataset.dataset, identity, is_checked=is_checked)
        indices = dataset.indices
        return None if inner is None else lambda index: inner(indices[index])
    samples = getattr(dataset, "samples", None)
    if not isinstance(samples, list) or not samples or not _is_path_first(samples[0]):
        return None

    if is_checked:
        return lambda index: file_stamp(samples[index][0], identity, repr(samples[index][1]))
    if len(samples) != len(dataset):
        return None
    return lambda index: hash_of(_whole(samples[index][0]), identity, repr(samples[index][1]))


def identity_of(dataset: Any) -> str:
    """Return a string that tells datasets apart: class, length, root, ``repr`` of transforms; of
    shards their names and part, and of what comes from URLs the options of its file system.
    """
    parts = [type(dataset).__qualname__, str(len(dataset))]
    root = getattr(dataset, "root", None)
    parts.append(os.path.abspath(root) if isinstance(root, str | os.PathLike) else repr(root))
    transforms = (getattr(dataset, name, None) for name in ("transform", "target_transform"))
    parts += map(_without_addresses, transforms)
    options = getattr(dataset, "storage_options", None)
    if isinstance(dataset, TarShards):
        parts += [repr(dataset), *map(_whole, dataset.urls)]
    if options:
        parts.append(_without_addresses(options))
    if getattr(dataset, "scaled", False) is True:  # of our ImageFolder: other pixels
        parts.append("scaled")
    inner = getattr(dataset, "dataset", None)
    if type(dataset) is Subset:
        parts += [identity_of(inner), str(hash_of(repr([*dataset.indices])))]
    return "\n".join(parts)


def _without_addresses(value: Any) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _whole(path: str) -> str:
    """Return a path as it is from any folder; a URL as it is."""
    return path if is_url(path) else os.path.abspath(path)


def _is_path_first(sample: Any) -> bool:
    return isinstance(sample, tuple) and len(sample) == 2 and isinstance(sample[0], str)
