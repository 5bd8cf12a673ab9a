"""Sources of encoded data: their types, their names in errors, and reading their bytes."""

from __future__ import annotations

import os
from typing import BinaryIO, TypeAlias

import torch
from torch import Tensor

from ._remote import is_url, read_url

Source: TypeAlias = str | os.PathLike[str] | bytes | bytearray | memoryview | Tensor | BinaryIO
"""A path, a URL that fsspec opens, the encoded bytes (as bytes or as a uint8 tensor of one
dimension), or a binary file."""


def source_name(source: Source) -> str:
    """Return the source's name in errors: its path, or ``<bytes>``."""
    if isinstance(source, str | os.PathLike):
        return os.fspath(source)
    if isinstance(source, bytes | bytearray | memoryview | Tensor):
        return "<bytes>"
    return str(getattr(source, "name", "<file object>"))


def read_source(source: Source) -> Tensor:
    """Read one source.

    Returns: a uint8 tensor of one dimension, CPU.
    Raises: OSError: a path cannot be read; TypeError: not a source.
    """
    if isinstance(source, Tensor):
        return bytes_of_tensor(source, "image")
    if isinstance(source, str | os.PathLike):
        return _to_tensor(_read_named(source))
    if isinstance(source, bytes | bytearray | memoryview):
        return _to_tensor(source)
    read = getattr(source, "read", None)
    content = read() if callable(read) else None
    if not isinstance(content, bytes | bytearray | memoryview):
        raise TypeError(
            f"an image source must be a path, bytes, a uint8 tensor or a file opened with 'rb', "
            f"got {type(source).__name__}."
        )
    return _to_tensor(content)


def bytes_of_tensor(source: Tensor, kind: str) -> Tensor:
    """Return a source of encoded bytes on the CPU. Raises: TypeError: it is of another shape or
    type."""
    if source.dtype != torch.uint8 or source.dim() != 1:
        raise TypeError(
            f"an encoded {kind} as a tensor must be uint8 with one dimension, "
            f"got {source.dtype} of shape {tuple(source.shape)}."
        )
    return source.detach().cpu().contiguous()


def _read_named(source: str | os.PathLike[str]) -> bytes:
    if is_url(source):
        return read_url(str(source))
    with open(source, "rb") as file:
        return file.read()


def _to_tensor(content: bytes | bytearray | memoryview) -> Tensor:
    if len(content) == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    # Copied: torch warns about read-only memory, and the caller may reuse theirs.
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
