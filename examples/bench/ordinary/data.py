"""Data on disk, written once, by the first dataset that needs it."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def written(path: Path, write: Callable[[Path], object]) -> Path:
    """Return ``path``, a file or a folder, which ``write`` makes if it is not there.

    It gets its name once it is complete, so that a process that is killed leaves no partial one.
    """
    if not path.exists():
        part = path.with_name(f"part-of-{path.name}")
        if part.is_dir():
            shutil.rmtree(part)
        part.unlink(missing_ok=True)
        write(part)
        part.rename(path)
    return path
