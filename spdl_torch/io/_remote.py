"""Open and read URLs through fsspec (torch installs it)."""

from __future__ import annotations

import asyncio
import io
import re
from typing import TYPE_CHECKING, Any, BinaryIO, cast

if TYPE_CHECKING:
    import concurrent.futures
    import os
    from collections.abc import Mapping

__all__ = ["aread_url", "glob_url", "is_url", "open_url", "read_url", "stream_url"]

# At least two letters before "://", so that no Windows drive is taken for a protocol. fsspec
# chains, "zip://a.txt::s3://bucket/b.zip" and "simplecache::s3://bucket/a", begin the same way.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]+)(::|://)")

_STREAM_BUFFER_BYTES = 1 << 20

# What pip calls the packages whose modules have another name.
_PIP_NAMES = {"smbclient": "smbprotocol", "libarchive": "libarchive-c"}


def is_url(source: str | os.PathLike[str]) -> bool:
    """Return whether a name has a protocol, as ``s3://bucket/key`` and ``memory://name`` do."""
    match = _URL.match(source) if isinstance(source, str) else None
    if match is None:
        return False
    # "ab::c.jpg" may be a file; a chain has a URL in it, or begins with a protocol of fsspec's.
    return "://" in match.string or _is_known(match[1])


def open_url(url: str, storage_options: Mapping[str, Any] | None = None) -> BinaryIO:
    """Open for reading, in binary and seekable where the file system allows it.

    storage_options: what fsspec's file system takes, such as ``{"anon": True}`` for ``s3://``.
    Raises: ImportError: the protocol needs a package that is not installed; OSError: no such file
        and what else the file system reports; ValueError: an unknown protocol.
    """
    system, path = _file_system(url, storage_options)
    return cast("BinaryIO", system.open(path, "rb"))


def stream_url(url: str, storage_options: Mapping[str, Any] | None = None) -> BinaryIO:
    """Open for reading from front to back; errors as :func:`open_url`.

    From a web server it is one request, and not one for every few megabytes, which some servers
    do not answer. Then the file cannot seek, and says so.
    """
    if not url.startswith(("http://", "https://")):
        return open_url(url, storage_options)
    system, path = _file_system(url, storage_options)
    file = _FromFront(system.open(path, "rb", block_size=0))
    return cast("BinaryIO", io.BufferedReader(file, _STREAM_BUFFER_BYTES))


def read_url(
    url: str,
    storage_options: Mapping[str, Any] | None = None,
    *,
    timeout_seconds: float | None = None,
) -> bytes:
    """Read the whole content; errors as :func:`open_url`.

    timeout_seconds: for the network file systems, which are asynchronous inside; others cannot be
        cut off. Then a TimeoutError.
    """
    system, path = _file_system(url, storage_options)
    if timeout_seconds is None or not _is_async(system, url):
        return _read_all(system, path, url)
    future = _submit(system, path)
    try:
        return future.result(timeout_seconds)
    except TimeoutError as error:
        if future.done():
            raise  # the file system's own
        future.cancel()
        raise _timed_out(url, timeout_seconds) from error


async def aread_url(
    url: str,
    storage_options: Mapping[str, Any] | None = None,
    *,
    timeout_seconds: float | None = None,
) -> bytes:
    """Read like :func:`read_url`; any number of coroutines may await this at once.

    The network file systems (http, s3, gs, abfs) read on fsspec's own event loop, which outlives
    the caller's, so that connections are kept; others read on a thread of the caller's loop.
    """
    system, path = _file_system(url, storage_options)
    if not _is_async(system, url):
        return await asyncio.to_thread(_read_all, system, path, url)
    limit = asyncio.timeout(timeout_seconds)
    try:
        async with limit:
            return await asyncio.wrap_future(_submit(system, path))
    except TimeoutError as error:
        if timeout_seconds is None or not limit.expired():
            raise  # the file system's own
        raise _timed_out(url, timeout_seconds) from error


def glob_url(pattern: str, storage_options: Mapping[str, Any] | None = None) -> list[str]:
    """Return the URLs of the files that match, unsorted; errors as :func:`open_url`."""
    system, path = _file_system(pattern, storage_options)
    found = cast("dict[str, dict[str, Any]]", system.glob(path, detail=True))
    protocol = cast("re.Match[str]", _URL.match(pattern))[1]
    names = [name for name, info in found.items() if info.get("type") != "directory"]
    return [name if is_url(name) else f"{protocol}://{name}" for name in names]


class _FromFront(io.RawIOBase):
    """fsspec's streamed file claims that it can seek."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        content = self._file.read(len(buffer))
        buffer[: len(content)] = content
        return len(content)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


def _file_system(url: str, storage_options: Mapping[str, Any] | None) -> tuple[Any, str]:
    import fsspec

    try:
        system, path = fsspec.core.url_to_fs(url, **(storage_options or {}))
    except ImportError as error:
        raise _missing_package(url, error) from error
    except ValueError as error:
        if "Protocol not known" not in str(error):
            raise
        raise ValueError(
            f"{url}: unknown protocol. Expected one that fsspec opens, such as s3://, gs://, "
            "abfs://, http://, file:// or memory://."
        ) from error
    return system, path


def _is_known(protocol: str) -> bool:
    import fsspec

    return protocol in fsspec.registry or protocol in fsspec.available_protocols()


def _missing_package(url: str, error: ImportError) -> ImportError:
    """Return an error that names the package: fsspec's names the protocol, only its cause that."""
    cause = error.__cause__ if isinstance(error.__cause__, ImportError) else error
    module = (cause.name or "").partition(".")[0]
    install = f" Run: pip install {_PIP_NAMES.get(module, module)}." if module else ""
    return ImportError(
        f"{url}: a package is missing: {error}.{install}", name=cause.name, path=cause.path
    )


def _is_async(system: Any, url: str) -> bool:
    # The file systems of a chain are asynchronous only in parts.
    return bool(system.async_impl) and not system.asynchronous and "::" not in url


def _read_all(system: Any, path: str, url: str) -> bytes:
    if "::" in url:  # caches answer open() in their own way, and the other calls less surely
        with system.open(path, "rb") as file:
            return cast("bytes", file.read())
    return cast("bytes", system.cat_file(path))


def _submit(system: Any, path: str) -> concurrent.futures.Future[bytes]:
    return asyncio.run_coroutine_threadsafe(system._cat_file(path), system.loop)


def _timed_out(url: str, timeout_seconds: float) -> TimeoutError:
    return TimeoutError(f"{url}: not read within {timeout_seconds} s.")
