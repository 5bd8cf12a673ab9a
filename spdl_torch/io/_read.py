"""A reading stage: paths and URLs to their bytes, with retries where they may help."""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING, Any

from ._cache.hashing import hash_of
from ._cache.opening import file_stamp, open_store
from ._cache.paths import CachedPath
from ._remote import afetch_url, fetch_url, is_url, url_stamp
from ._retry import BACKOFF_SECONDS, MAX_BACKOFF_SECONDS, RETRIES, RetryPolicy

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ._cache.store import Store


class Reader:
    """Reads paths and URLs: ``pipe(reader)`` on threads, ``pipe(reader.aread)`` on an event loop.

    A read that fails for a transient reason (timeouts, lost connections, HTTP 408, 425, 429 and
    5xx, any OSError but a missing file, permission or a wrong name) is retried after
    ``backoff_seconds``, twice that, four times that, up to ``max_backoff_seconds``, each
    shortened at random by up to a half. The defaults wait at most 21 s in total. After the last
    attempt the error itself is raised, with a note of the number of attempts.

    retries: further attempts for one read; 0 = none.
    timeout_seconds: the limit of one attempt on network file systems (http, s3, gs, abfs). Reads
        of local files and ``memory://`` cannot be cancelled and have none.
    keep_path: return ``(path, content)`` rather than the content, the path as given.
    storage_options: arguments of fsspec's file system, such as ``{"anon": True}`` for ``s3://``.

    cache: ``"memory"`` or a folder on a local disk, which keeps what is read for all processes of
        the machine: a remote store is read once. Files are checked for changes each time: local
        ones by size and modification time, URLs by what their file system reports of size, times,
        checksums and versions, which takes a round trip.
    max_bytes, version: of the cache, as for ``spdl_torch.data.cached``; another version reads anew,
        and where one is given, files are not checked.

    Any number of threads may call one reader; it can be pickled.

    **Stop.** Stopping a pipeline cancels ``aread`` at once, also while it waits for its next
    attempt. A read on a thread finishes first, its waits included.
    """

    def __init__(
        self,
        *,
        retries: int = RETRIES,
        backoff_seconds: float = BACKOFF_SECONDS,
        max_backoff_seconds: float = MAX_BACKOFF_SECONDS,
        timeout_seconds: float | None = None,
        keep_path: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        cache: str | os.PathLike[str] | None = None,
        max_bytes: int | None = None,
        version: str | int | None = None,
    ) -> None:
        if timeout_seconds is not None and timeout_seconds <= 0:
            raise ValueError(f"Reader: timeout_seconds must be > 0 or None, got {timeout_seconds}.")
        self._policy = RetryPolicy(retries, backoff_seconds, max_backoff_seconds)
        self._timeout_seconds = timeout_seconds
        self._keep_path = keep_path
        self._options = dict(storage_options or {})
        self._version = version
        self._store: Store | None = None
        if cache is not None:
            self._store = open_store(
                cache, "files of a reader", max_bytes=max_bytes, num_numbers=None, who="Reader"
            )

    def loading_remarks(self, num_files: int) -> tuple[str, ...]:
        """Return the remark of a loader's report about the cache, if there is one: what it holds of
        so many files, and this process's hits.
        """
        return () if self._store is None else (self._store.remark(num_files),)

    @property
    def num_retries(self) -> int:
        """The number of retries so far, by this object in this process."""
        return self._policy.num_retries

    def __call__(self, path: str | os.PathLike[str]) -> Any:
        """Read a path or URL; blocks.

        Returns: bytes, or ``(path, bytes)`` with ``keep_path``.
        Raises: OSError: a file that cannot be read; ImportError, ValueError: a protocol without
            its package, or an unknown one; and whatever else the file system raises.
        """
        name, num_failed = _name_of(path), 0
        while True:
            try:
                key = self._key(name)
                content = self._kept(key)
                if content is None:
                    content = self._read(name)
                    self._keep(key, content)
            except Exception as error:
                num_failed += 1
                wait = self._policy.wait_after(error, name, num_failed)
                if wait is None:
                    raise
            else:
                return (path, content) if self._keep_path else content
            time.sleep(wait)

    async def aread(self, path: str | os.PathLike[str]) -> Any:
        """Read a path or URL on an event loop, which may have many reads in flight.

        Local files and synchronous file systems are read on the few threads of the loop; for those
        alone, ``pipe(reader, concurrency=...)`` is faster.
        """
        name, num_failed = _name_of(path), 0
        while True:
            try:
                if self._store is None:
                    content = await self._aread(name)
                else:
                    content = await self._aread_kept(name)
            except Exception as error:
                num_failed += 1
                wait = self._policy.wait_after(error, name, num_failed)
                if wait is None:
                    raise
            else:
                return (path, content) if self._keep_path else content
            await asyncio.sleep(wait)

    async def _aread_kept(self, name: str) -> bytes:
        # The cache on threads: a local disk takes its time, too.
        key = await asyncio.to_thread(self._key, name)
        content = await asyncio.to_thread(self._kept, key)
        if content is None:
            content = await self._aread(name)
            await asyncio.to_thread(self._keep, key, content)
        return content

    def _key(self, name: str) -> tuple[int, int]:
        """Return number and stamp in the cache, before reading: a file that changes meanwhile is
        then not taken for what was read.
        """
        if self._store is None:
            return 0, 0
        if self._version is not None:
            return hash_of(name), hash_of(name, str(self._version))
        if is_url(name):
            return hash_of(name), hash_of(name, url_stamp(name, self._options))
        return hash_of(name), file_stamp(name)

    def _kept(self, key: tuple[int, int]) -> bytes | None:
        """Return what the cache has; None = nothing, or no cache."""
        content = None if self._store is None else self._store.get(*key)
        return None if content is None else bytes(content)

    def _keep(self, key: tuple[int, int], content: bytes) -> None:
        if self._store is not None:
            self._store.put(*key, [content])

    def _read(self, name: str) -> bytes:
        if isinstance(name, CachedPath):
            return name.content()
        if is_url(name):
            return fetch_url(
                name, self._options, timeout_seconds=self._timeout_seconds, is_repeated=True
            )
        return _read_local(name)

    async def _aread(self, name: str) -> bytes:
        if isinstance(name, CachedPath):
            return await name.acontent()
        if is_url(name):
            return await afetch_url(name, self._options, timeout_seconds=self._timeout_seconds)
        return await asyncio.to_thread(_read_local, name)


def _read_local(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:  # one read, straight into the result
        return file.readall()


def _name_of(path: str | os.PathLike[str]) -> str:
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"Reader: expected a path or a URL, got {type(path).__name__}.")
    return os.fspath(path)
