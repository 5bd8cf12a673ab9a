"""Files that are read from front to back and survive lost connections.

A file, an object or a web server's response is opened at an offset, with marks of its version.
After a failure it is opened again where reading had stopped, and has to be of the same version.
"""

from __future__ import annotations

import asyncio
import io
import os
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, TypeAlias, TypeVar, cast

from spdl_torch.errors import SourceChangedError
from spdl_torch.handlers import unless_of_handler

from ._remote import RetryPolicy, file_system, info_of, is_url, kept_copy, status_of

T = TypeVar("T")

Version: TypeAlias = dict[str, str]
"""What is known of a file's version: tags, dates, the size. Two are of one version if all that both
have is the same."""

_LOCAL_BUFFER_BYTES = 1 << 18  # a sample and the next header in one read of the disk
_BUFFER_BYTES = 1 << 20

_CHANGED_STATUSES = (412, 416)  # If-Match failed; no such range
_BLOCK_BYTES = 8 << 20
"""One request to an object store. fsspec's default for S3, 50 MiB, is held for every open file."""

_SKIP_BYTES = 1 << 20

_CONNECT_SECONDS = 30.0
_SILENCE_SECONDS = 60.0  # between two pieces of a web server's response

# What file systems know about the version of an object, under their own names.
_VERSION_FIELDS = (
    *("ETag", "etag", "generation", "md5Hash"),
    *("Last-Modified", "LastModified", "mtime", "size"),
)


def open_resuming(
    name: str,
    policy: RetryPolicy,
    storage_options: Mapping[str, Any] | None = None,
    *,
    seekable: bool = False,
    version: Version | None = None,
) -> BinaryIO:
    """Open a path or URL; opening and reading are repeated as ``policy`` allows.

    After a failure the file is opened again where reading had stopped; what was read before is not
    transferred twice where the store supports ranges. A success restores all attempts.

    seekable: read web servers by ranges, as other stores are. Otherwise they get one request for
        the whole file, which any of them answers, but such a file cannot seek.
    version: the version that a URL's file must have; None = the one that it has.
    Raises, also while reading: SourceChangedError: the file has another version now; otherwise
        as :func:`~spdl_torch.io._remote.file_system`, with a note that names the URL.
    """
    if not is_url(name):
        local = _Resuming(lambda *_: open_local(name), name, policy)
        return cast("BinaryIO", io.BufferedReader(local, _LOCAL_BUFFER_BYTES))
    if (copy := kept_copy(name)) is not None:
        return copy

    def open_at(offset: int, again: bool) -> Opened:
        system, path = file_system(name, storage_options)
        if again:
            system.invalidate_cache(path)  # a listing may be older than the object
        if name.startswith(("http://", "https://")):
            return (open_ranges if seekable else open_stream)(system, path, offset)
        # Of the network; the file systems of a chain are asynchronous only in parts.
        remote = system.async_impl and not system.asynchronous and "::" not in name
        return open_blocks(system, path, remote, storage_options)

    raw = _Resuming(open_at, name, policy, version)
    return cast("BinaryIO", io.BufferedReader(raw, _BUFFER_BYTES))


def version_of(url: str, policy: RetryPolicy, storage_options: Mapping[str, Any]) -> Version:
    """Return the version that a file has now. Raises: as opening it."""

    def ask() -> Version:
        system, path = file_system(url, storage_options)
        system.invalidate_cache(path)
        return _version_in(info_of(system, path))

    return policy.repeat(ask, url)


class _Resuming(io.RawIOBase):
    """Keeps reading a file that is opened again after each failure."""

    def __init__(
        self,
        open_at: Callable[[int, bool], Opened],
        name: str,
        policy: RetryPolicy,
        version: Version | None = None,
    ) -> None:
        self.name = name
        self._open_at = open_at
        self._policy = policy
        self._position = 0
        self._num_read = 0
        self._begun = False
        self._is_bound = bool(version)
        self.version = version or {}
        """What is known of the version that was opened first."""
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

    def _repeated(self, read: Callable[[], T]) -> T:
        return self._policy.repeat(read, self.name, self._failed)

    def _failed(self, error: Exception) -> None:
        self._drop()
        if self._num_read and status_of(error) in _CHANGED_STATUSES:
            raise self._changed(f"the server says: {error}") from error

    def _current(self) -> Opened:
        if self._opened is None:
            again, self._begun = self._begun, True
            opened = self._open_at(self._position, again)
            try:
                if self._num_read or self._is_bound:
                    self._check(opened.version)
                else:
                    self.version = opened.version
                if opened.is_at_start and self._position:
                    _advance(opened.file, self._position)
            except BaseException:
                _close(opened)
                raise
            self._opened = opened
        return self._opened

    def _check(self, version: Version) -> None:
        """Raise if this does not continue what was read: two versions must never be mixed."""
        for field, value in self.version.items():
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
            _close(opened)


@dataclass(frozen=True)
class Opened:
    """A file, and what is known about its version."""

    file: Any
    version: Version
    seekable: bool = True
    is_at_start: bool = True
    """Whether it stands at its beginning, not at the offset asked for."""


def _close(opened: Opened) -> None:
    try:
        opened.file.close()
    except unless_of_handler(Exception):
        pass  # it failed already, and that error is the one to report


def open_local(name: str) -> Opened:
    """Open a local file, even one that cannot seek, such as a named pipe."""
    file = open(name, "rb", buffering=0)  # noqa: SIM115 - closed by the reader of it
    there = os.fstat(file.fileno())
    version = {"size": f"{there.st_size}", "modification time (ns)": f"{there.st_mtime_ns}"}
    return Opened(file, version, file.seekable())


def open_blocks(
    system: Any, path: str, remote: bool, storage_options: Mapping[str, Any] | None
) -> Opened:
    """Open a file that asks for blocks as they are needed, as fsspec does for object stores."""
    sizes = {"block_size", "default_block_size", "blocksize"}.intersection(storage_options or {})
    options = {"block_size": _BLOCK_BYTES} if remote and not sizes else {}
    file = system.open(path, "rb", **options)
    details = getattr(file, "details", {}) if remote else {}
    return Opened(file, _version_in(details), file.seekable())


def open_ranges(system: Any, path: str, offset: int) -> Opened:
    """Open a web server's file for ranges, all of one version."""
    info = info_of(system, path)
    if not (info.get("partial", True) and info.get("size")):
        return open_stream(system, path, offset)
    headers = dict(system.kwargs.get("headers", {}))
    etag = info.get("ETag", "")
    if etag and not etag.startswith("W/"):
        headers["If-Match"] = etag
    elif "Last-Modified" in info:
        headers["If-Unmodified-Since"] = info["Last-Modified"]
    file = system.open(path, "rb", size=info["size"], headers=headers)
    return Opened(file, _version_in(info))


def open_stream(system: Any, path: str, offset: int) -> Opened:
    """Open a web server's response as it arrives; the socket holds back what is not read yet."""
    answer = _Answer(system, path, offset)
    if offset and "Content-Encoding" in answer.headers:  # offsets are those of what it decodes to
        answer.close()
        answer = _Answer(system, path, 0)
    is_part = answer.status == 206
    if is_part:
        length = answer.headers.get("Content-Range", "").rpartition("/")[2].replace("*", "")
    else:
        length = answer.headers.get("Content-Length", "")
    version = {name: answer.headers.get(name) for name in ("ETag", "Last-Modified")}
    known = _version_in({**version, "size": length})
    return Opened(answer, known, seekable=False, is_at_start=not is_part)


class _Answer:
    """A web server's response to one request, read from its start.

    fsspec's own file asks for the size first, which signed URLs refuse, and leaves connections of
    errors open.
    """

    def __init__(self, system: Any, path: str, offset: int) -> None:
        self._loop = system.loop
        self._answer = self._wait_for(_requested(system, path, offset))
        self.status: int = self._answer.status
        self.headers: Mapping[str, str] = self._answer.headers

    def read(self, size: int) -> bytes:
        """Wait for some bytes, at most ``size``; none at the end."""
        return cast("bytes", self._wait_for(self._answer.content.read(size)))

    def close(self) -> None:
        """Close the connection, unless the response was read to its end."""
        self._loop.call_soon_threadsafe(self._answer.close)

    def _wait_for(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()


async def _requested(system: Any, path: str, offset: int) -> Any:
    import aiohttp

    # aiohttp's own limit, 5 minutes for a whole response, would end streams that are read no faster
    # than training needs them.
    limits = aiohttp.ClientTimeout(
        total=None, sock_connect=_CONNECT_SECONDS, sock_read=_SILENCE_SECONDS
    )
    options = {"timeout": limits, **system.kwargs}
    if "timeout" in system.client_kwargs:
        options["timeout"] = system.client_kwargs["timeout"]
    options["headers"] = {**options.get("headers", {}), "Accept-Encoding": "identity"}
    if offset:
        options["headers"]["Range"] = f"bytes={offset}-"
    session = await system.set_session()
    answer = await session.get(system.encode_url(path), **options)
    if answer.status == 404:
        answer.release()
        raise FileNotFoundError(path)
    answer.raise_for_status()
    return answer


def _version_in(known: Mapping[str, Any]) -> Version:
    return {field: str(known[field]) for field in _VERSION_FIELDS if known.get(field)}


def _advance(file: Any, offset: int) -> None:
    """Seek, or read up to the offset where that is refused."""
    try:
        file.seek(offset)
    except (AttributeError, OSError, ValueError):
        while offset > 0 and (content := file.read(min(offset, _SKIP_BYTES))):
            offset -= len(content)
