"""A reading stage: paths and URLs to their bytes, with retries where they may help."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from ._remote import fetch_url, is_url
from ._retry import BACKOFF_SECONDS, MAX_BACKOFF_SECONDS, RETRIES, RetryPolicy

if TYPE_CHECKING:
    from collections.abc import Mapping


class Reader:
    """Reads paths and URLs, as a stage: ``pipe(reader, concurrency=64)``.

    A read that fails for a transient reason (timeouts, lost connections, HTTP 408, 425, 429 and
    5xx, any OSError but a missing file, permission or a wrong name) is retried after
    ``backoff_seconds``, twice that, four times that, up to ``max_backoff_seconds``, each
    shortened at random by up to a half. The defaults wait at most 21 s in total. After the last
    attempt the error itself is raised, with a note of the number of attempts.

    retries: further attempts for one read; 0 = none.
    keep_path: return ``(path, content)`` rather than the content, the path as given.
    storage_options: arguments of fsspec's file system, such as ``{"anon": True}`` for ``s3://``.

    Any number of threads may call one reader; it can be pickled.
    A pipeline that stops waits for its reads, their waits included.
    """

    def __init__(
        self,
        *,
        retries: int = RETRIES,
        backoff_seconds: float = BACKOFF_SECONDS,
        max_backoff_seconds: float = MAX_BACKOFF_SECONDS,
        keep_path: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._policy = RetryPolicy(retries, backoff_seconds, max_backoff_seconds)
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
            its package, or an unknown one; and whatever else the file system raises.
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

    def _read(self, name: str) -> bytes:
        if is_url(name):
            return fetch_url(name, self._options, is_repeated=True)
        return _read_local(name)


def _read_local(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:  # one read, straight into the result
        return file.readall()


def _name_of(path: str | os.PathLike[str]) -> str:
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"Reader: expected a path or a URL, got {type(path).__name__}.")
    return os.fspath(path)
