"""The bytes of files, read once on a machine."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from ...io._cache.hashing import hash_of
from ...io._cache.opening import file_stamp
from ...io._image.reading import read_sources

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from ...io._cache.store import Store


class CachedFiles:
    """The bytes of files by path, from a store or, the first time, from the files themselves.

    A file whose size or modification time has changed is read again; with ``version``, files are
    not checked.
    """

    def __init__(self, store: Store, version: str | int | None) -> None:
        self._store = store
        self._version = version

    def contents(self, paths: Sequence[str]) -> list[Tensor]:
        """Return the files' bytes: uint8, one dimension each. Raises: OSError."""
        numbers = [hash_of(os.path.abspath(path)) for path in paths]
        stamps = [self._stamp(path) for path in paths]
        found = [self._store.get(*key) for key in zip(numbers, stamps, strict=True)]
        missing = [place for place, content in enumerate(found) if content is None]
        contents: list[Tensor] = [
            torch.frombuffer(content, dtype=torch.uint8)
            if content
            else torch.empty(0, dtype=torch.uint8)
            for content in found
        ]
        if missing:  # one call reads them all
            read = read_sources([paths[place] for place in missing])
            for place, content in zip(missing, read, strict=True):
                contents[place] = content
                self._store.put(numbers[place], stamps[place], [content.numpy()])
        return contents

    def counts(self) -> dict[str, int]:
        """Return how many files this process found in the cache, and how many it did not."""
        return self._store.counts()

    def remarks(self, num_files: int) -> tuple[str, ...]:
        """Return the remark for a loader's report: what the cache holds, this process's hits."""
        return (self._store.remark(num_files),)

    def _stamp(self, path: str) -> int:
        if self._version is None:
            return file_stamp(path)
        return hash_of(os.path.abspath(path), str(self._version))
