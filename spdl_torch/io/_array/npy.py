"""Arrays in numpy's npy format: views into the given memory."""

from __future__ import annotations

import ast
import contextlib
import math
import os
import sys
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from spdl_torch.errors import DecodeError
from spdl_torch.handlers import unless_of_handler
from spdl_torch.shown_text import short_repr

from .._source import Memory, Source, memory_of, source_name, view_of

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Buffer

    _Layout: TypeAlias = tuple[np.dtype[Any], tuple[int, ...], Literal["C", "F"], int]

_MAGIC = b"\x93NUMPY"
_USUAL_HEADER = 128
"""The size in bytes, magic and length included."""
_USUAL_VERSION_AND_LENGTH = b"\1\0\x76\0"
_LARGEST_HEADER = 10_000
"""The most characters, as in numpy: Python's parser is not made for hostile text."""
_KEYS = {"descr", "fortran_order", "shape"}
_EVALUATIONS = 100  # of one header; one in some hundred fails in the worst case


class MalformedError(ValueError):
    """Raised for bytes that are not an array; the caller adds the source's name."""


def load_npy(data: Source | Buffer, *, copy: bool = False) -> NDArray[Any]:
    """Load an array that ``numpy.save`` wrote, without copying it.

    Args:
        data: a path, a URL that fsspec opens, a binary file, or memory: ``bytes``, a uint8
            tensor of one dimension, an mmap, anything with the buffer protocol.
        copy: True returns a copy, aligned and writable.

    Returns: dtype, shape and order as saved. The array views the source's memory and keeps it
        alive: read-only if that is (``bytes`` is), and changing with it. A path is read in one
        call into new memory, so that array is writable. Bytes after the array are ignored, as in
        numpy: a file that can seek is left where they begin, so that the next call loads the next
        array.
    Raises:
        DecodeError: not an npy file, truncated, or of dtype object, which needs a pickle.
        OSError: a path cannot be read.
        TypeError: not a source.
    """
    memory = data if type(data) is bytes else memory_of(data, "array")
    try:
        array, end = view_npy(memory, 0, len(memory))
    except MalformedError as error:
        raise DecodeError(f"{source_name(data)}: {error}") from error.__cause__
    if end < len(memory) and hasattr(data, "seek") and view_of(data) is None:
        with contextlib.suppress(OSError, ValueError):  # a pipe
            data.seek(end - len(memory), os.SEEK_CUR)
    return array.copy(order="K") if copy else array


def view_npy(memory: Memory, start: int, stop: int) -> tuple[NDArray[Any], int]:
    """View the array whose npy file begins at ``start`` and ends at ``stop`` or before.

    Returns: the array, and the offset of the end of its data.
    Raises: MalformedError: not an npy file; the message does not name the source.
    """
    # Almost all headers take 128 bytes; each different one is parsed once and remembered.
    end = start + _USUAL_HEADER
    header = bytes(memory[start:end])
    if end > stop or header[6:10] != _USUAL_VERSION_AND_LENGTH:
        end = _end_of_header(memory, start, stop)
        header = bytes(memory[start:end])
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


def _end_of_header(memory: Memory, start: int, stop: int) -> int:
    """Return the end of the header, for any version."""
    first = bytes(memory[start : min(stop, start + 12)])
    _check_magic(first)
    size = 2 if first[6] == 1 else 4
    length = int.from_bytes(first[8 : 8 + size], "little")
    end = start + 8 + size + length
    if len(first) < 8 + size or end > stop:
        raise MalformedError(f"truncated: {stop - start} bytes, the header alone needs more.")
    if length > _LARGEST_HEADER:
        raise MalformedError(f"the header is {length} bytes long, more than {_LARGEST_HEADER}.")
    return end


def _check_magic(first: bytes) -> None:
    if not first:
        raise MalformedError("empty.")
    if not first.startswith(_MAGIC[: len(first)]):
        what = f"it begins with {first[:8]!r}"
        if first.startswith(b"PK"):
            what = "but a zip archive: use load_npz"
        elif first[:1] == b"\x80":
            what = "but a pickle, which is refused: loading it can run any code"
        raise MalformedError(f"not an npy file, {what}.")
    if len(first) < 8:
        raise MalformedError(f"truncated: {len(first)} bytes, the header alone needs more.")
    if first[6] not in (1, 2, 3) or first[7] != 0:
        raise MalformedError(f"npy version {first[6]}.{first[7]} is not known, only 1.0 to 3.0.")


@lru_cache(maxsize=256)
def _parse(header: bytes) -> _Layout:
    """Parse a header of any version, magic included: dtype, shape, order, and bytes of the data."""
    _check_magic(header)
    version = header[6]
    text = header[10 if version == 1 else 12 :]
    try:
        values = _evaluated(text.decode("utf-8" if version == 3 else "latin-1").lstrip())
    # literal_eval documents five classes for text like this.
    except unless_of_handler(Exception) as error:
        raise MalformedError(f"the header is not a literal: {error}") from error
    if not isinstance(values, dict) or values.keys() != _KEYS:
        raise MalformedError(
            f"the header must be a dict with the keys {sorted(_KEYS)}, got {short_repr(values)}."
        )
    dtype, shape, fortran = _dtype_of(values["descr"]), values["shape"], values["fortran_order"]
    # type() rather than isinstance: True is not a size.
    if not isinstance(shape, tuple) or not all(type(size) is int and size >= 0 for size in shape):
        raise MalformedError(f"shape must be a tuple of sizes >= 0, got {short_repr(shape)}.")
    if not isinstance(fortran, bool):
        raise MalformedError(f"fortran_order must be True or False, got {short_repr(fortran)}.")
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes > sys.maxsize:  # Python also refuses to print numbers of any length
        raise MalformedError(
            f"{dtype} of shape {short_repr(shape)} takes more bytes than there are."
        )
    return dtype, shape, "F" if fortran else "C", num_bytes


def _evaluated(literal: str) -> Any:
    """Return the value of a literal. Raises: what ``ast.literal_eval`` raises for its text."""
    for _ in range(_EVALUATIONS):
        try:
            return ast.literal_eval(literal)
        except SystemError:
            # CPython gh-106905: up to 3.11.7 and 3.12.1 all threads share one counter of the depth.
            # Where a garbage collection lets another thread parse meanwhile, the count is wrong.
            continue
    return ast.literal_eval(literal)


def _dtype_of(descr: Any) -> np.dtype[Any]:
    try:
        dtype = np.lib.format.descr_to_dtype(descr)
    # Of many classes: numpy trusts what it unpacks here.
    except unless_of_handler(Exception) as error:
        raise MalformedError(f"{short_repr(descr)} is not a dtype: {error}") from error
    if dtype.hasobject:
        raise MalformedError(
            "dtype object is stored as a pickle, which is refused: loading it can run any code. "
            "Save numbers or strings of fixed length instead."
        )
    if dtype.subdtype is not None or dtype.itemsize == 0:
        raise MalformedError(f"an array cannot have the dtype {dtype} by itself.")
    return dtype
