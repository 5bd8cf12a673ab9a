"""Array sources as memory: the caller's own memory wherever it is given."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np
import torch

from .._remote import is_url, read_url
from .._source import bytes_of_tensor, source_name

if TYPE_CHECKING:
    from io import FileIO

    from numpy.typing import NDArray
    from typing_extensions import Buffer

    from .._source import Source


class Memory(Protocol):
    """``bytes``, or a uint8 array of one dimension: slices are cheap, ``bytes()`` copies them.

    An array's buffer is not known to the type checker before Python 3.12, hence the casts.
    """

    def __len__(self) -> int: ...
    def __getitem__(self, key: slice, /) -> Memory: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...


def open_memory(source: Source | Buffer) -> Memory:
    """Return the bytes of a source, without a copy of buffers and CPU tensors.

    The returned memory keeps the source alive; while it lives, a bytearray cannot be resized and
    an mmap cannot be closed.

    Returns: the source itself if it is ``bytes``, else uint8 of one dimension; read-only exactly
        if the source is. A path is read in one call into new memory, which is writable.
    Raises: OSError: a path cannot be read; TypeError: not a source.
    """
    if isinstance(source, bytes):
        return source
    if isinstance(source, torch.Tensor):
        return cast("Memory", bytes_of_tensor(source, "array").numpy())
    if isinstance(source, str | os.PathLike):
        return read_url(os.fspath(source)) if is_url(source) else _read_file(source)
    read = getattr(source, "read", None)
    if callable(read) and not _has_buffer(source):  # an mmap has both
        source = read()
        if isinstance(source, bytes):
            return source
    try:
        view = memoryview(cast("Buffer", source))
    except TypeError:
        raise TypeError(
            f"an array source must be a path, an object with the buffer protocol (bytes, "
            f"memoryview, mmap), a uint8 tensor or a file opened with 'rb', "
            f"got {type(source).__name__}."
        ) from None
    if not view.c_contiguous:
        raise TypeError("an array source must be contiguous memory, got a buffer with strides.")
    return _from_buffer(view)


def go_back(source: Source | Buffer, num_bytes: int) -> None:
    """Leave a file that was read to its end so many bytes before that, if it can seek."""
    seek = getattr(source, "seek", None)
    if callable(seek) and not _has_buffer(source):
        with contextlib.suppress(OSError, ValueError):  # a pipe
            seek(-num_bytes, os.SEEK_CUR)


def memory_name(source: Source | Buffer) -> str:
    """Return the source's name in errors: its path, or ``<bytes>`` for memory of any kind."""
    is_named = isinstance(source, str | os.PathLike) or not _has_buffer(source)
    return source_name(cast("Source", source)) if is_named else "<bytes>"


def _from_buffer(view: memoryview) -> Memory:
    # numpy refuses to view empty memory. frombuffer, unlike ndarray(buffer=...), holds the export,
    # without which a bytearray could be resized under the arrays.
    return cast("Memory", np.frombuffer(view, dtype=np.uint8)) if view.nbytes else b""


def _has_buffer(source: object) -> bool:
    try:
        memoryview(cast("Buffer", source)).release()
    except TypeError:
        return False
    return True


def _read_file(path: str | os.PathLike[str]) -> Memory:
    # Not mapped, although that would be a quarter faster for files in the cache: every mapping
    # holds a file descriptor as long as an array lives, and truncating the file would end the
    # process. Callers that want a mapping pass one.
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if size == 0:  # empty, or a pipe or a file of /proc, which report no size
            return file.read()
        memory = np.empty(size, dtype=np.uint8)
        num_read = _fill(file, memory)
    return cast("Memory", memory[:num_read])


def _fill(file: FileIO, memory: NDArray[np.uint8]) -> int:
    """Fill the memory and return the number of bytes read, fewer if the file was truncated."""
    num_read = 0
    while count := file.readinto(memory[num_read:].data):
        num_read += count
    return num_read
