"""Files that are read from front to back and survive lost connections."""

from __future__ import annotations

import io
import time
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from spdl_torch.errors import SourceChangedError

from ._opening import Opened, open_blocks, open_local, open_ranges, open_stream
from ._remote import file_system, is_async, is_url
from ._retry import status_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ._retry import RetryPolicy

_LOCAL_BUFFER_BYTES = 1 << 18  # a sample and the next header in one read of the disk
_BUFFER_BYTES = 1 << 20

_CHANGED_STATUSES = (412, 416)  # If-Match failed; no such range


def open_resuming(
    name: str,
    policy: RetryPolicy | None,
    storage_options: Mapping[str, Any] | None = None,
    *,
    seekable: bool = False,
) -> BinaryIO:
    """Open a path or URL; opening and reading are repeated as ``policy`` allows, None = never.

    After a failure the file is opened again where reading had stopped; what was read before is not
    transferred twice where the store supports ranges. A success restores all attempts.

    seekable: read web servers by ranges, as other stores are. Otherwise they get one request for
        the whole file, which any of them answers, but such a file cannot seek.
    Raises, also while reading: SourceChangedError: the file has another version now; otherwise
        as :func:`~spdl_torch.io._remote.fetch_url`, with a note that names the URL.
    """
    if not is_url(name):
        local = _Resuming(partial(open_local, name), name, policy)
        return cast("BinaryIO", io.BufferedReader(local, _LOCAL_BUFFER_BYTES))

    def open_at(offset: int, again: bool) -> Opened:
        system, path = file_system(name, storage_options, is_repeated=policy is not None)
        if again:
            system.invalidate_cache(path)  # a listing may be older than the object
        if name.startswith(("http://", "https://")):
            return (open_ranges if seekable else open_stream)(system, path, offset)
        return open_blocks(system, path, offset, is_async(system, name), storage_options)

    return cast("BinaryIO", io.BufferedReader(_Resuming(open_at, name, policy), _BUFFER_BYTES))


class _Resuming(io.RawIOBase):
    """Keeps reading a file that is opened again after each failure."""

    def __init__(
        self, open_at: Callable[[int, bool], Opened], name: str, policy: RetryPolicy | None
    ) -> None:
        self.name = name
        self._open_at = open_at
        self._policy = policy
        self._position = 0
        self._num_read = 0
        self._begun = False
        self._version: dict[str, Any] = {}
        self._opened: Opened | None = None
        self._can_seek: bool = self._repeated(self._current).seekable

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._can_seek

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # only memoryviews come
        content = self._repeated(lambda: self._current().file.read(len(buffer)))
        buffer[: len(content)] = content
        self._position += len(content)
        self._num_read += len(content)
        return len(content)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if not self._can_seek:
            raise io.UnsupportedOperation(f"{self.name}: can be read from front to back only.")
        if whence == io.SEEK_CUR:
            offset, whence = offset + self._position, io.SEEK_SET
        self._position = self._repeated(lambda: self._current().file.seek(offset, whence))
        return self._position

    def tell(self) -> int:
        return self._position

    def close(self) -> None:
        if not self.closed:
            self._drop()
        super().close()

    def _repeated(self, read: Callable[[], Any]) -> Any:
        num_failed = 0
        while True:
            try:
                return read()
            except Exception as error:
                if self._num_read and status_of(error) in _CHANGED_STATUSES:
                    raise self._changed(f"the server says: {error}") from error
                if self._policy is None:
                    raise
                num_failed += 1
                wait = self._policy.wait_after(error, self.name, num_failed)
                if wait is None:
                    raise
                self._drop()
            time.sleep(wait)

    def _current(self) -> Opened:
        if self._opened is None:
            again, self._begun = self._begun, True
            self._opened = self._open_at(self._position, again)
            if self._num_read:
                self._check(self._opened.version)
            else:
                self._version = self._opened.version
        return self._opened

    def _check(self, version: dict[str, Any]) -> None:
        """Raise if this does not continue what was read: two versions must never be mixed."""
        for field, value in self._version.items():
            if field in version and version[field] != value:
                raise self._changed(f"{field} was {value} and is {version[field]}")

    def _changed(self, what: str) -> SourceChangedError:
        return SourceChangedError(
            f"{self.name}: changed while it was read, before byte {self._position}: {what}. Read "
            "it again from the beginning, and write new content under a new name."
        )

    def _drop(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            try:
                opened.file.close()
            except Exception:
                pass  # it failed already, and that error is the one to report
