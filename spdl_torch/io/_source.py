"""Sources of encoded data: their types, their names in errors, and reading their bytes."""

from __future__ import annotations

import os
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ._remote import is_url, read_url

Source: TypeAlias = (
    str | os.PathLike[str] | bytes | bytearray | memoryview | Tensor | BinaryIO | dict[str, Any]
)
"""A path, a URL that fsspec opens, the encoded bytes (as bytes or as a uint8 tensor of one
dimension), a binary file, or what Hugging Face's datasets store: ``{"bytes": ..., "path": ...}``,
of which the path is used where the bytes are None."""

Memory: TypeAlias = Any
"""``bytes``, or a uint8 array of one dimension: slices are cheap, ``bytes()`` copies them. The type
checker knows no buffers of arrays before Python 3.12."""


def stored(source: Any) -> Any:
    """Return the bytes or the path in what Hugging Face's datasets store; other sources as they
    are. Raises: TypeError: neither is there."""
    if not isinstance(source, dict):
        return source
    content = source.get("bytes")
    found = source.get("path") if content is None else content
    if found is None:
        raise TypeError(f"a source that is a dict has neither bytes nor a path: {sorted(source)}.")
    return found


def source_name(source: Any) -> str:
    """Return the source's name in errors: its path, or ``<bytes>`` for memory of any kind."""
    if isinstance(source, dict):
        return str(source.get("path") or "<bytes>")
    if isinstance(source, str | os.PathLike):
        return os.fspath(source)
    if isinstance(source, Tensor) or view_of(source) is not None:
        return "<bytes>"
    return str(getattr(source, "name", "<file object>"))


def read_source(source: Source) -> Tensor:
    """Read one source.

    Returns: a uint8 tensor of one dimension, CPU.
    Raises: OSError: a path cannot be read; TypeError: not a source.
    """
    source = stored(source)
    if isinstance(source, Tensor):
        return bytes_of_tensor(source, "image")
    if isinstance(source, np.ndarray):
        raise TypeError(
            "an image source must be a path, bytes, a uint8 tensor or a file opened with 'rb', "
            "got ndarray: pass array.tobytes() if it is an encoded image."
        )
    content = source if isinstance(source, memoryview) else memory_of(source, "image")
    if len(content) == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    if isinstance(source, str | os.PathLike) and isinstance(content, np.ndarray):
        return torch.from_numpy(content)
    # Copied: torch warns about read-only memory, and the caller may reuse theirs.
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def memory_of(source: Any, kind: str) -> Memory:
    """Return the bytes of a source, without a copy of buffers and CPU tensors.

    The returned memory keeps the source alive; while it lives, a bytearray cannot be resized and
    an mmap cannot be closed.

    kind: what it should be, for messages.
    Returns: the source itself if it is ``bytes``, else uint8 of one dimension; read-only exactly
        if the source is. A path is read in one call into new memory, which is writable.
    Raises: OSError: a path cannot be read; TypeError: not a source.
    """
    source = stored(source)
    if isinstance(source, Tensor):
        return bytes_of_tensor(source, kind).numpy()
    if isinstance(source, str | os.PathLike):
        return read_url(os.fspath(source)) if is_url(source) else _read_file(source)
    view = view_of(source)
    if view is None and callable(read := getattr(source, "read", None)):
        source = read()
        view = view_of(source)
    if view is None:
        raise TypeError(
            f"an {kind} source must be a path, an object with the buffer protocol (bytes, "
            f"memoryview, mmap), a uint8 tensor or a file opened with 'rb', "
            f"got {type(source).__name__}."
        )
    if isinstance(source, bytes):
        return source
    if not view.c_contiguous:
        raise TypeError(f"{kind}: a source must be contiguous memory, got a buffer with strides.")
    # numpy refuses to view empty memory. frombuffer, unlike ndarray(buffer=...), holds the export,
    # without which a bytearray could be resized under the arrays.
    return np.frombuffer(view, np.uint8) if view.nbytes else b""


def view_of(source: Any) -> memoryview | None:
    """Return a view of an object that is memory, such as an mmap; None = it is not."""
    try:
        return memoryview(source)
    except TypeError:
        return None


def bytes_of_tensor(source: Tensor, kind: str) -> Tensor:
    """Return a source of encoded bytes on the CPU. Raises: TypeError: it is of another shape or
    type."""
    if source.dtype != torch.uint8 or source.dim() != 1:
        raise TypeError(
            f"an encoded {kind} as a tensor must be uint8 with one dimension, "
            f"got {source.dtype} of shape {tuple(source.shape)}."
        )
    return source.detach().cpu().contiguous()


def _read_file(path: str | os.PathLike[str]) -> Memory:
    # Not mapped, although that would be a quarter faster for files in the cache: every mapping
    # holds a file descriptor as long as an array lives, and truncating the file would end the
    # process. Callers that want a mapping pass one.
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if size == 0:  # empty, or a pipe or a file of /proc, which report no size
            return file.read()
        memory, done = np.empty(size, np.uint8), 0
        while count := file.readinto(memory[done:].data):
            done += count
    return memory[:done]  # fewer if the file was cut meanwhile
