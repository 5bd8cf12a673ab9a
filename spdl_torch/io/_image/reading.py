"""The encoded bytes of a batch of images."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from .._remote import is_url
from .._source import read_source
from . import kernel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from .._source import Source


def read_sources(sources: Sequence[Source]) -> list[Tensor]:
    """Read every source; all paths together in one call that does not hold the GIL.

    Returns: one uint8 tensor of one dimension per source, CPU.
    Raises: OSError: a path cannot be read; TypeError: not a source.
    """
    paths = [os.fspath(s) for s in sources if isinstance(s, str | os.PathLike) and not is_url(s)]
    if len(paths) == len(sources) and paths:
        try:
            return kernel.read_files(paths)
        except (RuntimeError, AttributeError):
            pass  # a path is missing or empty (found below), or torchvision has no reader
    return [read_source(source) for source in sources]
