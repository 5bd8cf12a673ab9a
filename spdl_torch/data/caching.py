"""Samples, and the bytes of files, that are made once per machine and read by all its processes."""

from __future__ import annotations

import operator
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.utils.data import Dataset, IterableDataset, Subset

from ..handlers import unless_of_handler
from ..io._cache.folders import file_stamp, hash_of
from ..io._cache.memory import open_store
from ..io._cache.samples import sample_bytes, sample_from
from ..io._image.images import read_sources
from ..io._remote import is_url
from ..loader.differences import path_of_difference
from .mixing.mixture import Mixture
from .sources import Parquet, TarShards

if TYPE_CHECKING:
    from torch import Tensor

    from ..io._cache.store import Store

T_co = TypeVar("T_co", covariant=True)

_NUM_COMPARED = 2  # samples that each process makes twice, to see whether they may be cached
_SPREAD = 0x1E3779B97F4A7C15  # odd: the keys of a dataset's indices are all different


def cached(
    dataset: Any,
    cache: str | os.PathLike[str] = "memory",
    *,
    transform: Callable[[Any], Any] | None = None,
    max_bytes: int | None = None,
    version: str | int | None = None,
) -> CachedDataset[Any]:
    """Return the dataset with its samples cached: each is made once on this machine, by whichever
    process needs it first, and then read by all ranks and workers. Several processes that have
    several threads may make a few twice.

    Args:
        dataset: map-style. Its samples must be the same every time. Tensors and arrays that are
            found are contiguous in memory; everything else is pickled. Of a mixture, cache the
            sources.
        cache: ``"memory"``: shared memory, freed when the training's last process ends. The ranks
            of a machine share it if torchrun, Slurm (``srun``), Lightning or ``multiprocessing``
            started them, and they make their caches in the same order. Or a folder, best on a local
            disk: later programs find it filled, and several may use it at once.
        transform: applied to each sample as it is handed out: the place for random augmentation.
        max_bytes: the most bytes to keep; None = in memory half of what is free now for all caches
            together, on disk all but 5 % of it. What does not fit is made again every time. On
            disk, samples of other versions and transforms of the dataset that no program uses are
            removed, the oldest first, while all together take more.
        version: the version of what samples are made from; another version does not find the
            samples of this one. Datasets of files with ``samples``, as ImageFolder has, need none:
            a file's size and modification time are checked whenever its sample is read from the
            cache, unless a version is given. For others, a cache on disk requires it.

    The first two samples of each process are made twice and compared.

    Raises: TypeError, ValueError, OSError: see the message. On access: ValueError: a sample is not
        what it was, because the dataset draws random numbers or has changed.
    """
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise TypeError(
            f"cached: expected a map-style dataset, got {type(dataset).__name__}. The samples of "
            "an iterable one have no index to be kept under."
        )
    if isinstance(dataset, Mixture):
        raise TypeError("cached: a mixture has other samples in each epoch. Cache its sources.")
    name = _name_of(dataset)
    identity = "\n".join([name, *_transforms_of(dataset), repr(version)])
    stamp_of = _sample_stamps(dataset, identity, is_checked=version is None)
    is_folder = isinstance(cache, str | os.PathLike) and cache != "memory"
    if stamp_of is None and version is None and is_folder:
        raise ValueError(
            f"cached: version is needed for a {type(dataset).__name__} on disk: it does not say "
            "which files its samples are made from, so nothing would show that they have changed. "
            'Pass version="1", and another one whenever they change.'
        )
    store = open_store(cache, name, identity, max_bytes=max_bytes, who="cached")
    return CachedDataset(dataset, store, transform, stamp_of or partial(_same, hash_of(identity)))


@dataclass(eq=False, repr=False)
class CachedDataset(Dataset[T_co]):
    """A map-style dataset whose samples are cached, made by :func:`cached`."""

    dataset: Any
    """The dataset whose samples are cached."""
    _store: Store
    transform: Callable[[Any], Any] | None
    """The function that is applied to each sample as it is handed out."""
    _stamp_of: Callable[[int], int]
    _num_compared: Counter[str] = field(init=False, default_factory=Counter)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> T_co:
        """Return the sample, from the cache or made now, and transformed.

        Raises: what the dataset or ``transform`` raises; ValueError: see :func:`cached`.
        """
        number = operator.index(index)
        number += len(self) if number < 0 else 0
        if not 0 <= number < len(self):
            raise IndexError(f"index {index} is out of range for {len(self)} samples.")
        sample = self._sample(number)
        return sample if self.transform is None else self.transform(sample)  # type: ignore[no-any-return]  # the user's function

    def loading_remarks(self) -> tuple[str, ...]:
        """Return the remark for a loader's report: what this process found there."""
        return (self._store.remark(),)

    def loading_counts(self) -> dict[str, int]:
        """Return how many samples this process found in the cache, and how many it did not."""
        return self._store.counts()

    def _sample(self, index: int) -> Any:
        key = (self._stamp_of(index) + index * _SPREAD) % (1 << 63)
        content = self._store.get(key)
        if content is None:
            with self._store.making(key):
                content = self._store.get(key, is_counted=False)
                if content is None:
                    return self._made(index, key)
        sample = sample_from(content)
        self._compare("found", sample, index)
        return sample

    def _made(self, index: int, key: int) -> Any:
        """Make a sample and cache it."""
        sample = self.dataset[index]
        self._compare("made", sample, index)
        try:
            content = sample_bytes(sample)
        except unless_of_handler(Exception) as error:
            raise TypeError(
                f"cached: sample {index}, a {type(sample).__name__}, cannot be kept: {error}. "
                "Samples of tensors, arrays, numbers and text can."
            ) from error
        self._store.put(key, content)
        return sample

    def _compare(self, how: str, sample: Any, index: int) -> None:
        """Compare one of the first samples with the same sample made again."""
        if self._num_compared[how] >= _NUM_COMPARED:
            return
        self._num_compared[how] += 1
        if path_of_difference(sample, self.dataset[index], loosely=True) is None:
            return
        if how == "made":
            raise ValueError(
                f"cached: sample {index} is not the same when it is made twice, so a cache would "
                "freeze what is random in it. Pass the random part as cached(..., transform=...)."
            )
        raise ValueError(
            f"cached: sample {index} in {self._store.folder} is not what the dataset makes now. If "
            "the dataset has changed, pass another version, or delete the folder. If its samples "
            "are random, pass the random part as cached(..., transform=...)."
        )


def contents_of_files(
    store: Store, paths: Sequence[str], version: str | int | None
) -> list[Tensor]:
    """Return the bytes of files, uint8 of one dimension each, from the store or, the first time,
    from the files themselves.

    A file whose size or modification time has changed is read again; with ``version``, files are
    not checked. Raises: OSError.
    """
    if version is None:
        keys = [file_stamp(path) for path in paths]
    else:
        keys = [hash_of(os.path.abspath(path), str(version)) for path in paths]
    found = [store.get(key) for key in keys]
    missing = [place for place, content in enumerate(found) if content is None]
    contents: list[Tensor] = [
        torch.frombuffer(content, dtype=torch.uint8)
        if content
        else torch.empty(0, dtype=torch.uint8)
        for content in found
    ]
    # One call reads all that are missing.
    read = read_sources([paths[place] for place in missing]) if missing else []
    for place, content in zip(missing, read, strict=True):
        contents[place] = content
        store.put(keys[place], content.numpy().data)
    return contents


def _sample_stamps(dataset: Any, identity: str, *, is_checked: bool) -> Callable[[int], int] | None:
    """Return the function that gives for an index a number that is another when the sample's origin
    is another, for a dataset of files: a ``torchvision.datasets.ImageFolder``, or another with
    ``samples``. None = the dataset does not say which files it reads.

    is_checked: whether the number is another when the file has changed.
    """
    if type(dataset) is Subset:
        inner = _sample_stamps(dataset.dataset, identity, is_checked=is_checked)
        return None if inner is None else partial(_stamp_in_subset, inner, dataset.indices)
    samples: Any = getattr(dataset, "samples", None)
    first = samples[0] if isinstance(samples, list) and samples else None
    if not (isinstance(first, tuple) and len(first) == 2 and isinstance(first[0], str)):
        return None
    if is_checked or len(samples) == len(dataset):
        return partial(_stamp_of_file, samples, identity, is_checked)
    return None


def _same(stamp: int, index: int) -> int:
    return stamp


def _stamp_in_subset(inner: Callable[[int], int], indices: Sequence[int], index: int) -> int:
    return inner(indices[index])


def _stamp_of_file(
    samples: list[tuple[str, Any]], identity: str, is_checked: bool, index: int
) -> int:
    path, target = samples[index]
    if is_checked:
        return file_stamp(path, identity, repr(target))
    return hash_of(_whole(path), identity, repr(target))


def _name_of(dataset: Any) -> str:
    """Return a string that tells datasets apart: class, length and root; of shards and of Parquet
    their names and part, and of what comes from URLs the options of its file system.
    """
    parts = [type(dataset).__qualname__, str(len(dataset))]
    root = getattr(dataset, "root", None)
    parts.append(os.path.abspath(root) if isinstance(root, str | os.PathLike) else repr(root))
    if isinstance(dataset, TarShards | Parquet):
        parts += [repr(dataset), *map(_whole, dataset.urls)]
    if options := getattr(dataset, "storage_options", None):
        parts.append(_without_addresses(options))
    if type(dataset) is Subset:
        parts += [_name_of(dataset.dataset), str(hash_of(repr([*dataset.indices])))]
    return "\n".join(parts)


def _transforms_of(dataset: Any) -> list[str]:
    """Return strings that tell apart what a dataset makes of its files."""
    names = ("transform", "target_transform")
    parts = [_without_addresses(getattr(dataset, name, None)) for name in names]
    if getattr(dataset, "scaled", False) is True:  # of our ImageFolder: other pixels
        parts.append("scaled")
    return parts + (_transforms_of(dataset.dataset) if type(dataset) is Subset else [])


def _without_addresses(value: Any) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _whole(path: str) -> str:
    """Return a path as it is from any folder; a URL as it is."""
    return path if is_url(path) else os.path.abspath(path)
