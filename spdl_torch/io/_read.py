"""The reading stage: from paths and URLs to their bytes, with retries where they may help."""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING, Any

from ._remote import aread_url, is_url, read_url
from ._retry import RetryPolicy

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Reader"]


class Reader:
    """The content of a path or URL; for ``pipe(reader)`` on threads, ``pipe(reader.aread)`` async.

    A read that failed for a reason that may pass (timeouts, lost connections, HTTP 408, 425, 429
    and 5xx, any OSError but a missing file, permission or a wrong name) is made again, after
    ``backoff_seconds``, twice that, four times that, up to ``max_backoff_seconds``, each
    shortened at random by up to a half. The defaults wait 0.7 s in all at most. Then the error
    itself is raised, with a note that has the number of attempts.

    retries: further attempts for one read; 0 = none.
    timeout_seconds: of one attempt, on file systems that can be cut off: those of the network
        (http, s3, gs, abfs). Local files and ``memory://`` cannot.
    keep_path: return ``(path, content)`` rather than the content, the path as it was given.
    storage_options: what fsspec's file system takes, such as ``{"anon": True}`` for ``s3://``.

    One reader may be called by any number of threads, and pickled.

    **Stop.** A pipeline that is stopped cancels ``aread`` at once, also while it waits for its
    next attempt. On a thread the read that runs is finished, waits included.
    """

    def __init__(
        self,
        *,
        retries: int = 3,
        backoff_seconds: float = 0.1,
        max_backoff_seconds: float = 5.0,
        timeout_seconds: float | None = None,
        keep_path: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        if timeout_seconds is not None and timeout_seconds <= 0:
            raise ValueError(f"Reader: timeout_seconds must be > 0 or None, got {timeout_seconds}.")
        self._policy = RetryPolicy(retries, backoff_seconds, max_backoff_seconds)
        self._timeout_seconds = timeout_seconds
        self._keep_path = keep_path
        self._options = dict(storage_options or {})

    @property
    def num_retries(self) -> int:
        """The number of retries so far, by this object in this process."""
        return self._policy.num_retries

    def __call__(self, path: str | os.PathLike[str]) -> Any:
        """Read a path or URL; blocks.

        Returns: bytes, or ``(path, bytes)`` with ``keep_path``.
        Raises: OSError: a file that cannot be read; ImportError, ValueError: a protocol without
            its package, or an unknown one; and what else the file system raises.
        """
        name, num_failed = _name_of(path), 0
        while True:
            try:
                content = self._read(name)
            except Exception as error:
                num_failed += 1
                wait = self._policy.wait_after(error, name, num_failed)
                if wait is None:
                    raise
            else:
                return (path, content) if self._keep_path else content
            time.sleep(wait)

    async def aread(self, path: str | os.PathLike[str]) -> Any:
        """Read a path or URL like the call, for many reads in flight on one event loop.

        Local files and file systems that are not asynchronous are read on the loop's threads, of
        which there are few: for those alone, ``pipe(reader, concurrency=...)`` is the quicker way.
        """
        name, num_failed = _name_of(path), 0
        while True:
            try:
                content = await self._aread(name)
            except Exception as error:
                num_failed += 1
                wait = self._policy.wait_after(error, name, num_failed)
                if wait is None:
                    raise
            else:
                return (path, content) if self._keep_path else content
            await asyncio.sleep(wait)

    def _read(self, name: str) -> bytes:
        if is_url(name):
            return read_url(name, self._options, timeout_seconds=self._timeout_seconds)
        return _read_local(name)

    async def _aread(self, name: str) -> bytes:
        if is_url(name):
            return await aread_url(name, self._options, timeout_seconds=self._timeout_seconds)
        return await asyncio.to_thread(_read_local, name)


def _read_local(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:  # the whole file in one read, into its place
        return file.readall()


def _name_of(path: str | os.PathLike[str]) -> str:
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"Reader: expected a path or a URL, got {type(path).__name__}.")
    return os.fspath(path)
