"""Retries of reading: which errors are transient, and the wait before the next attempt."""

from __future__ import annotations

import errno
import io
import logging
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

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
