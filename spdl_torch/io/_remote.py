"""What lies behind a URL, opened and read through fsspec (torch installs it)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, BinaryIO, cast

if TYPE_CHECKING:
    import os

__all__ = ["is_url", "open_url", "read_url"]

# At least two letters before "://", so that no Windows drive is taken for a protocol. fsspec
# chains, "zip://a.txt::s3://bucket/b.zip", begin the same way.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]+(::|://)")


def is_url(source: str | os.PathLike[str]) -> bool:
    """Whether a source's name has a protocol, as ``s3://bucket/key`` and ``memory://name`` have."""
    return isinstance(source, str) and _URL.match(source) is not None


def open_url(url: str) -> BinaryIO:
    """Open for reading, in binary and seekable where the file system allows it.

    Raises: ImportError: the protocol needs a package that is not installed; OSError: no such file
        and what else the file system reports; ValueError: an unknown protocol.
    """
    import fsspec

    return cast("BinaryIO", fsspec.open(url, "rb").open())


def read_url(url: str) -> bytes:
    """The whole content; errors as :func:`open_url`."""
    with open_url(url) as file:
        return file.read()
