"""Files, objects and web responses, opened at an offset, with marks of their version."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping

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


@dataclass(frozen=True)
class Opened:
    """A file at the offset asked for, and what is known about its version."""

    file: Any
    version: dict[str, Any]
    seekable: bool = True


def open_local(name: str, offset: int, again: bool) -> Opened:
    """Open a local file, even one that cannot seek, such as a named pipe."""
    file = open(name, "rb", buffering=0)  # noqa: SIM115 - closed by the reader of it
    _advance(file, offset)
    there = os.fstat(file.fileno())
    version = {"size": there.st_size, "modification time (ns)": there.st_mtime_ns}
    return Opened(file, version, file.seekable())


def open_blocks(
    system: Any,
    path: str,
    offset: int,
    remote: bool,
    storage_options: Mapping[str, Any] | None,
) -> Opened:
    """Open a file that asks for blocks as they are needed, as fsspec does for object stores."""
    sizes = {"block_size", "default_block_size", "blocksize"}.intersection(storage_options or {})
    options = {"block_size": _BLOCK_BYTES} if remote and not sizes else {}
    file = system.open(path, "rb", **options)
    _advance(file, offset)
    details = getattr(file, "details", {}) if remote else {}
    return Opened(file, _version_in(details), file.seekable())


def open_ranges(system: Any, path: str, offset: int) -> Opened:
    """Open a web server's file for ranges, all of one version."""
    info = system.info(path)
    if not (info.get("partial", True) and info.get("size")):
        return open_stream(system, path, offset)
    etag = info.get("ETag", "")
    headers = dict(system.kwargs.get("headers", {}))
    if etag and not etag.startswith("W/"):
        headers["If-Match"] = etag
    file = system.open(path, "rb", size=info["size"], headers=headers)
    file.seek(offset)
    return Opened(file, _version_in(info))


def open_stream(system: Any, path: str, offset: int) -> Opened:
    """Open a web server's response as it arrives; the socket holds back what is not read yet."""
    answer = _Answer(system, path, offset)
    if offset and "Content-Encoding" in answer.headers:  # offsets are those of what it decodes to
        answer.close()
        answer = _Answer(system, path, 0)
    if answer.status == 206:
        length = answer.headers.get("Content-Range", "").rpartition("/")[2].replace("*", "")
    else:
        length = answer.headers.get("Content-Length", "")
        try:
            _skip(answer, offset)
        except BaseException:
            answer.close()
            raise
    version = {name: answer.headers.get(name) for name in ("ETag", "Last-Modified")}
    return Opened(answer, _version_in({**version, "size": length}), seekable=False)


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
    options = {"timeout": _limits_of_a_stream(), **system.kwargs}
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


def _version_in(known: Mapping[str, Any]) -> dict[str, Any]:
    return {field: known[field] for field in _VERSION_FIELDS if known.get(field)}


def _limits_of_a_stream() -> Any:
    """Return limits for connecting and for silence. aiohttp's own, 5 minutes for a whole response,
    would end streams that are read no faster than training needs them.
    """
    import aiohttp

    return aiohttp.ClientTimeout(
        total=None, sock_connect=_CONNECT_SECONDS, sock_read=_SILENCE_SECONDS
    )


def _advance(file: Any, offset: int) -> None:
    """Seek, or read up to the offset where that is refused."""
    if offset == 0:
        return
    try:
        file.seek(offset)
    except (OSError, ValueError):
        _skip(file, offset)


def _skip(file: Any, left: int) -> None:
    while left > 0 and (content := file.read(min(left, _SKIP_BYTES))):
        left -= len(content)
