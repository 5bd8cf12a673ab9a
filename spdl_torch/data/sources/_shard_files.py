"""Opening the tar files of shards: local, remote, or from a cache on this machine."""

from __future__ import annotations

import io
import os
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from spdl_torch.errors import DecodeError
from spdl_torch.io._cache.blocks import CachedBlocks
from spdl_torch.io._cache.hashing import hash_of
from spdl_torch.io._cache.opening import file_stamp, open_store
from spdl_torch.io._read import Reader
from spdl_torch.io._remote import is_url, read_url_range
from spdl_torch.io._resuming import open_resuming

if TYPE_CHECKING:
    from collections.abc import Mapping

    from spdl_torch.io._cache.store import Store
    from spdl_torch.io._retry import RetryPolicy

_BUFFER_BYTES = 1 << 18  # a sample and the next header in one read of the disk
_RANGE_BYTES = 1 << 24  # read in one request; of more, a few megabytes at a time


class ShardFiles:
    """Opens shards by path or URL.

    cache, max_bytes, version: as for ``Reader``; tars are kept block by block.
    """

    def __init__(
        self,
        storage_options: Mapping[str, Any] | None = None,
        cache: str | os.PathLike[str] | None = None,
        max_bytes: int | None = None,
        version: str | int | None = None,
    ) -> None:
        self._options = dict(storage_options or {})
        self._version = version
        self._store: Store | None = None
        if cache is not None:
            self._store = open_store(
                cache,
                f"tar shards\n{version!r}",
                max_bytes=max_bytes,
                num_numbers=None,
                who="TarShards",
            )

    def open(self, url: str, policy: RetryPolicy) -> BinaryIO:
        """Open a shard to be read from its front; opening and reading are repeated as ``policy``
        allows. Raises: OSError.
        """
        if self._store is not None:
            return self._open_cached(url, policy)
        return open_resuming(url, policy, self._options)

    def open_at(self, url: str, first: int, end: int, num_bytes: int) -> BinaryIO:
        """Open a shard of a known size to be read from byte ``first`` to ``end``.

        Raises: OSError; DecodeError: a local file has another size.
        """
        file: BinaryIO
        if self._store is not None:
            file = self._open_cached(url, None)
        elif not is_url(url):
            file = _open_local(url, min(_BUFFER_BYTES, end - first))
            _check_size(file, url, num_bytes)
        elif end - first <= _RANGE_BYTES:
            return io.BytesIO(read_url_range(url, first, end, self._options))
        else:
            file = open_resuming(url, None, self._options, seekable=True)
        file.seek(first)
        return file

    def read(self, url: str) -> bytes:
        """Read a whole small file, such as an index. Raises: OSError."""
        content: bytes = Reader(storage_options=self._options)(url)
        return content

    def remarks(self, num_bytes: int | None) -> tuple[str, ...]:
        """Return the remark for a loader's report about the cache, if there is one."""
        if self._store is None:
            return ()
        return (self._store.remark(CachedBlocks.count(num_bytes or self._store.num_bytes)),)

    def _open_cached(self, url: str, policy: RetryPolicy | None) -> BinaryIO:
        assert self._store is not None, "guaranteed by the caller"
        if self._version is not None or is_url(url):
            stamp = hash_of(url, str(self._version))
        else:
            stamp = file_stamp(url)
        blocks = CachedBlocks(self._store, url, stamp, lambda: self._open_origin(url, policy))
        return cast("BinaryIO", io.BufferedReader(blocks, _BUFFER_BYTES))

    def _open_origin(self, url: str, policy: RetryPolicy | None) -> BinaryIO:
        return open_resuming(url, policy, self._options, seekable=True)


def _open_local(path: str, buffer_bytes: int) -> BinaryIO:
    return open(path, "rb", buffering=buffer_bytes)


def _check_size(file: BinaryIO, url: str, num_bytes: int) -> None:
    size = os.fstat(file.fileno()).st_size
    if size != num_bytes:
        file.close()
        raise DecodeError(
            f"{url}: the tar has {size} bytes, and its index is of one with {num_bytes}. Delete "
            "the index, and write it anew: python -m spdl_torch prepare --index FOLDER."
        )
