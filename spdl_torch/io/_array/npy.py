"""Arrays in numpy's npy format: views into the given memory."""

from __future__ import annotations

import contextlib
import math
import sys
from functools import lru_cache
from io import BytesIO
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from spdl_torch.errors import DecodeError
from spdl_torch.handlers import unless_of_handler
from spdl_torch.shown_text import short_repr

from .._source import Memory, Source, memory_of, source_name

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Buffer

    _Layout: TypeAlias = tuple[np.dtype[Any], tuple[int, ...], Literal["C", "F"], int]

_USUAL_HEADER = 128
"""The size in bytes, magic and length included."""
_USUAL_VERSION_AND_LENGTH = b"\1\0\x76\0"
_ATTEMPTS = 100  # for one header; one in some hundred fails in the worst case


class MalformedError(ValueError):
    """Raised for bytes that are not an array; the caller adds the source's name."""


def load_npy(data: Source | Buffer) -> NDArray[Any]:
    """Load an array that ``numpy.save`` wrote, without copying it.

    Args:
        data: a path, a URL that fsspec opens, a binary file, or memory: ``bytes``, a uint8
            tensor of one dimension, an mmap, anything with the buffer protocol.

    Returns: dtype, shape and order as saved. The array views the source's memory and keeps it
        alive: read-only if that is (``bytes`` is), and changing with it; ``numpy.array`` copies
        it. A path is read in one call into new memory, so that array is writable. Bytes after the
        array are ignored, as in numpy; a file is read to its end.
    Raises:
        DecodeError: not an npy file, truncated, or of dtype object, which needs a pickle.
        OSError: a path cannot be read.
        TypeError: not a source.
    """
    memory = data if type(data) is bytes else memory_of(data, "array")
    try:
        return view_npy(memory, 0, len(memory))[0]
    except MalformedError as error:
        raise DecodeError(f"{source_name(data)}: {error}") from error.__cause__


def view_npy(memory: Memory, start: int, stop: int) -> tuple[NDArray[Any], int]:
    """View the array whose npy file begins at ``start`` and ends at ``stop`` or before.

    Returns: the array, and the offset of the end of its data.
    Raises: MalformedError: not an npy file; the message does not name the source.
    """
    # Almost all headers take 128 bytes; each different one is parsed once and remembered.
    end = start + _USUAL_HEADER
    header = bytes(memory[start:end])
    if end > stop or header[6:10] != _USUAL_VERSION_AND_LENGTH:
        size = 10 if header[6:7] == b"\1" else 12
        end = start + size + int.from_bytes(header[8:size], "little")
        header = bytes(memory[start : min(end, stop)])
    dtype, shape, order, num_bytes = _parse(header)
    data_end = end + num_bytes
    if data_end > stop:
        raise MalformedError(
            f"truncated: {dtype} of shape {short_repr(shape)} takes {num_bytes} bytes, "
            f"got {stop - end}."
        )
    try:
        return np.ndarray(shape, dtype, memory, end, None, order), data_end
    except unless_of_handler(ValueError, TypeError, OverflowError) as error:
        raise MalformedError(f"no array has shape {short_repr(shape)}: {error}") from error


@lru_cache(maxsize=256)
def _parse(header: bytes) -> _Layout:
    """Parse a header of any version, magic included: dtype, shape, order, and bytes of the data."""
    try:
        shape, is_fortran, dtype = _read_header(header)
    # Of many classes: numpy trusts what it unpacks here.
    except unless_of_handler(Exception) as error:
        raise MalformedError(f"not an npy file: {error}") from error
    if dtype.hasobject:
        raise MalformedError(
            "dtype object is stored as a pickle, which is refused: loading it can run any code. "
            "Save numbers or strings of fixed length instead."
        )
    if dtype.subdtype is not None or dtype.itemsize == 0:
        raise MalformedError(f"an array cannot have the dtype {dtype} by itself.")
    num_bytes = math.prod(shape) * dtype.itemsize
    # numpy takes -1 for as many as fit; Python refuses to print numbers of any length.
    if min(shape, default=0) < 0 or num_bytes > sys.maxsize:
        raise MalformedError(f"no array has shape {short_repr(shape)}.")
    return dtype, shape, "F" if is_fortran else "C", num_bytes


def _read_header(header: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Return shape, order and dtype, as numpy reads them. Raises: what numpy raises."""
    version = np.lib.format.read_magic(BytesIO(header))
    read = np.lib.format.read_array_header_2_0
    if version == (1, 0):
        read = np.lib.format.read_array_header_1_0
    elif version == (3, 0):
        # numpy has no public function for it; escapes say the same in a literal.
        text = header[12:].decode("utf-8").encode("ascii", "backslashreplace")
        header = header[:8] + len(text).to_bytes(4, "little") + text
    elif version != (2, 0):
        raise ValueError(f"version {version} is not known.")
    for _ in range(_ATTEMPTS):
        # CPython gh-106905: up to 3.11.7 and 3.12.1 all threads share one counter of the depth of
        # literals. Where a garbage collection lets another thread parse meanwhile, it is wrong.
        with contextlib.suppress(SystemError):
            return read(BytesIO(header[8:]))
    return read(BytesIO(header[8:]))
