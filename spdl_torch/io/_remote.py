"""Reading paths and URLs, whole; URLs through fsspec (torch installs it). Retries: which errors are
transient, and the wait before the next attempt."""

from __future__ import annotations

import errno
import io
import logging
import os
import random
import re
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from glob import has_magic
from typing import Any, BinaryIO, TypeVar, cast

from ..checks import check_whole
from ..engine.failures import attach_note, notes_of
from ..errors import DecodeError, SourceChangedError
from ..handlers import unless_of_handler

T = TypeVar("T")

_logger = logging.getLogger("spdl_torch.io")

# Of the system: no seed of the user's changes the waits, and forked processes do not wait alike.
_jitter = random.SystemRandom()

_FAILED = "reading %r failed (attempt %d of %d, next in %.2f s): %s: %s"
_LOUD_SECONDS = 1.0
"""The wait from which on the log has a warning."""
_MOST_SECONDS = 300.0
"""That attempts may take in all, beside the waits: file systems repeat what fails, too."""

_LASTING = (
    *(FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError),
    *(DecodeError, SourceChangedError, io.UnsupportedOperation),
)
_LASTING_ERRNOS = frozenset(
    {
        *(errno.EINVAL, errno.ELOOP, errno.ENAMETOOLONG, errno.ENODEV, errno.ENXIO, errno.EROFS),
        *(errno.ENOSYS, errno.EOPNOTSUPP),
    }
)

# "Try later" in HTTP: request timeout, too early, too many requests.
_TRANSIENT_STATUSES = frozenset({408, 425, 429})

# Lost connections that are not an OSError. Looked up only where the module is loaded already.
_CONNECTION_ERRORS = (
    ("aiohttp", ("ClientConnectionError", "ClientPayloadError")),
    ("botocore.exceptions", ("ConnectionError", "HTTPClientError")),
)


def is_transient(error: BaseException) -> bool:
    """Return whether a retry may succeed: timeouts, lost connections, a busy server.

    False for a missing file, a missing permission, a wrong name, and anything but a failed read.
    """
    if isinstance(error, _LASTING):
        return False
    status = status_of(error)
    if status is not None:
        return status >= 500 or status in _TRANSIENT_STATUSES
    if isinstance(error, OSError):
        return error.errno not in _LASTING_ERRNOS
    for module, names in _CONNECTION_ERRORS:
        loaded: Any = sys.modules.get(module)
        if loaded and isinstance(error, tuple(getattr(loaded, name) for name in names)):
            return not isinstance(error, ValueError)  # aiohttp's error for a malformed URL
    return False


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status that aiohttp, gcsfs or requests keeps in an error, or None."""
    answer = getattr(error, "response", None)
    for holder, name in ((error, "status"), (error, "code"), (answer, "status_code")):
        status = getattr(holder, name, None)
        if isinstance(status, int):
            return status
    return None


def note_failure(error: BaseException, name: str, num_attempts: int) -> None:
    """Attach a note with the name and the number of attempts.

    One attempt, and an error that names the file by itself, needs no note, nor does one that has
    it: of a reader within the reader.
    """
    begin = f"reading {name!r} failed after "
    if num_attempts == 1 and name in str(error):
        return
    if not any(note.startswith(begin) for note in notes_of(error)):
        times = "1 attempt" if num_attempts == 1 else f"{num_attempts} attempts"
        attach_note(error, f"{begin}{times}")


RETRIES, _BACKOFF_SECONDS, _MAX_BACKOFF_SECONDS = 9, 0.1, 5.0
"""The default, and the first and the longest wait, of all that reads: waits of at most 21 s in all,
about as long as S3's own clients go on. A store that slows its clients down often does so for
seconds."""


@dataclass(frozen=True)
class RetryPolicy:
    """How often a read is tried again. Any number of threads may use it."""

    retries: int = RETRIES

    def __post_init__(self) -> None:
        check_whole("reading", least=0, retries=self.retries)

    def repeat(
        self, read: Callable[[], T], name: str, failed: Callable[[Exception], object] | None = None
    ) -> T:
        """Return what ``read`` returns, called again while it fails for a transient reason: as
        often as may be, until the attempts have taken five minutes.

        failed: called with each error, before the wait for the next attempt. Raises: the last
            error, with a note as by :func:`note_failure`.
        """
        num_failed = 0
        last = time.monotonic() + _MOST_SECONDS + self.retries * _MAX_BACKOFF_SECONDS
        while True:
            try:
                return read()
            except unless_of_handler(Exception) as error:
                if failed is not None:
                    failed(error)
                num_failed += 1
                is_over = num_failed > self.retries or time.monotonic() > last
                if is_over or not is_transient(error):
                    note_failure(error, name, num_failed)
                    raise
                seconds = _wait_after(num_failed)
                level = logging.WARNING if seconds >= _LOUD_SECONDS else logging.DEBUG
                told = name, num_failed, self.retries + 1, seconds, type(error).__name__, error
                _logger.log(level, _FAILED, *told)
            time.sleep(seconds)


def _wait_after(num_failed: int) -> float:
    """Return the seconds to wait before the next attempt, after so many that failed."""
    longest = min(_MAX_BACKOFF_SECONDS, _BACKOFF_SECONDS * 2.0 ** (num_failed - 1))
    # Between half and all of it, so that readers that failed together do not return together.
    return longest * _jitter.uniform(0.5, 1.0)


# At least two letters before "://", so that no Windows drive is taken for a protocol. fsspec
# chains, "zip://a.txt::s3://bucket/b.zip" and "simplecache::s3://bucket/a", begin the same way.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]+)(::|://)")

_policy = RetryPolicy()  # of reads without options
_OUT_OF_RANGE = 416  # in HTTP


def is_url(source: str | os.PathLike[str]) -> bool:
    """Return whether a name has a protocol, as ``s3://bucket/key`` and ``memory://name`` do."""
    match = _URL.match(source) if isinstance(source, str) else None
    if match is None:
        return False
    if "://" in match.string:
        return True
    import fsspec

    # "ab::c.jpg" may be a file; a chain has a URL in it, or begins with a protocol of fsspec's.
    return match[1] in fsspec.registry or match[1] in fsspec.available_protocols()


def read_url(url: str) -> bytes:
    """Read the whole content, as a :class:`Reader` does by default. Errors as its own."""
    return _policy.repeat(lambda: _fetch(url, None), url)


def kept_copy(url: str) -> BinaryIO | None:
    """Open the copy of a URL's file, if its source keeps one; it repeats what fails."""
    opens: Callable[[], BinaryIO] | None = getattr(url, "open", None)
    return None if opens is None else opens()


def _fetch(
    url: str, storage_options: Mapping[str, Any] | None, first: int = 0, end: int | None = None
) -> bytes:
    """Read the whole content, or the bytes from ``first`` up to ``end``."""
    file: Any = kept_copy(url)
    if file is None:
        system, path = file_system(url, storage_options)
        if "::" not in url:
            part = {} if end is None else {"start": first, "end": end}
            # s3fs otherwise looks up the size first, perhaps in an old listing, and reads large
            # objects in parts that need not be of one version.
            in_one_request = {"max_concurrency": 1} if "s3" in system.protocol else {}
            return cast("bytes", system.cat_file(path, **part, **in_one_request))
        file = system.open(path, "rb")  # caches implement it themselves, other calls less reliably
    with file:
        if first:
            file.seek(first)
        return cast("bytes", file.read(-1 if end is None else end - first))


def read_url_range(
    url: str, first: int, end: int, storage_options: Mapping[str, Any] | None = None
) -> bytes:
    """Read the bytes from ``first`` up to ``end``; errors as :func:`file_system`.

    Raises: DecodeError: the file is shorter; OSError: more come, as the server ignores ranges.
    """
    try:
        content = _fetch(url, storage_options, first, end)
    except Exception as error:
        if status_of(error) != _OUT_OF_RANGE:
            raise
        content = b""
    told = f"asked for the bytes from {first} to {end}, got {len(content)}"
    if len(content) < end - first:
        raise DecodeError(f"{url}: {told}: the file is shorter than it should be.")
    if len(content) > end - first:
        raise OSError(errno.EINVAL, f"{told}: its server knows no ranges", url)
    return content


def glob_url(pattern: str, storage_options: Mapping[str, Any] | None = None) -> list[str]:
    """Return the URLs of the files that match, unsorted; errors as :func:`read_url`."""

    def glob() -> dict[str, dict[str, Any]]:
        system, path = file_system(pattern, storage_options)
        found = cast("dict[str, dict[str, Any]]", system.glob(path, detail=True))
        if not found and not has_magic(path):  # it takes whatever fails for a missing file
            with suppress(FileNotFoundError):
                found = {path: dict(info_of(system, path))}
        return found

    found = _policy.repeat(glob, pattern)
    protocol = cast("re.Match[str]", _URL.match(pattern))[1]
    names = [name for name, info in found.items() if info.get("type") != "directory"]
    return [name if is_url(name) else f"{protocol}://{name}" for name in names]


def info_of(system: Any, path: str) -> Mapping[str, Any]:
    """Return what a store says of a file. fsspec's web servers call whatever fails "not found"."""
    try:
        return cast("Mapping[str, Any]", system.info(path))
    except FileNotFoundError as error:
        cause = error.__cause__
        if not isinstance(cause, Exception) or status_of(cause) in (404, 410):
            raise
        raise cause from None


def file_system(url: str, storage_options: Mapping[str, Any] | None) -> tuple[Any, str]:
    """Return fsspec's file system and the path in it.

    storage_options: arguments of fsspec's file system, such as ``{"anon": True}`` for ``s3://``.
    Raises: ImportError: the protocol needs a package that is not installed; ValueError: an unknown
        protocol; whatever else the file system raises.
    """
    import fsspec

    system, path = fsspec.core.url_to_fs(url, **(storage_options or {}))
    return system, path


class Reader:
    """Reads paths and URLs, as a stage: ``pipe(reader, concurrency=64)``.

    A read that fails for a transient reason (timeouts, lost connections, HTTP 408, 425, 429 and
    5xx, any OSError but a missing file, permission or a wrong name) is retried after 0.1 s, twice
    that, four times that, up to 5 s, each shortened at random by up to a half: by default after
    21 s in all at most. After the last attempt the error itself is raised, with a note of the
    number of attempts.

    retries: further attempts for one read; 0 = none.
    storage_options: arguments of fsspec's file system, such as ``{"anon": True}`` for ``s3://``.

    Any number of threads may call one reader; it can be pickled.
    A pipeline that stops waits for its reads, their waits included.
    """

    def __init__(
        self, *, retries: int = RETRIES, storage_options: Mapping[str, Any] | None = None
    ) -> None:
        self._policy = RetryPolicy(retries)
        self._options = dict(storage_options or {})

    def __call__(self, path: str | os.PathLike[str]) -> bytes:
        """Read a path or URL; blocks.

        Raises: OSError: a file that cannot be read; ImportError, ValueError: a protocol without
            its package, or an unknown one; and whatever else the file system raises.
        """
        if not isinstance(path, str | os.PathLike):
            raise TypeError(f"Reader: expected a path or a URL, got {type(path).__name__}.")
        name = os.fspath(path)
        return self._policy.repeat(lambda: self._read(name), name)

    def _read(self, name: str) -> bytes:
        if is_url(name):
            return _fetch(name, self._options)
        with open(name, "rb", buffering=0) as file:  # one read, straight into the result
            return file.readall()
