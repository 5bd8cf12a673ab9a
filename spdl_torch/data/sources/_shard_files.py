"""Opening a part of a shard's tar file."""

from __future__ import annotations

import io
import os
from typing import TYPE_CHECKING, Any, BinaryIO

from spdl_torch.errors import DecodeError
from spdl_torch.io._remote import is_url, read_url_range
from spdl_torch.io._resuming import open_resuming

if TYPE_CHECKING:
    from collections.abc import Mapping

_BUFFER_BYTES = 1 << 18  # a sample and the next header in one read of the disk
_RANGE_BYTES = 1 << 24  # read in one request; of more, a few megabytes at a time


def open_part(
    url: str, first: int, end: int, num_bytes: int, storage_options: Mapping[str, Any]
) -> BinaryIO:
    """Open a shard of a known size to be read from byte ``first`` to ``end``.

    Raises: OSError; DecodeError: a local file has another size.
    """
    if not is_url(url):
        file = _open_local(url, min(_BUFFER_BYTES, end - first))
        _check_size(file, url, num_bytes)
    elif end - first <= _RANGE_BYTES:
        return io.BytesIO(read_url_range(url, first, end, storage_options))
    else:
        file = open_resuming(url, None, storage_options, seekable=True)
    file.seek(first)
    return file


def _open_local(path: str, buffer_bytes: int) -> BinaryIO:
    return open(path, "rb", buffering=buffer_bytes)


def _check_size(file: BinaryIO, url: str, num_bytes: int) -> None:
    size = os.fstat(file.fileno()).st_size
    if size != num_bytes:
        file.close()
        raise DecodeError(
            f"{url}: the tar has {size} bytes, and its index is of one with {num_bytes}. Delete "
            "the index, and write it anew: python -m spdl_torch prepare --index FOLDER."
        )
