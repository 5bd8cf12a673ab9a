"""What the datasets share: data on disk, written once, and samples that come again and again."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Repeated(Dataset[Any]):
    """``count`` samples, out of fewer in ``source``."""

    def __init__(self, source: Any, count: int) -> None:
        self.source = source
        self.count = count

    def __len__(self) -> int:
        return self.count


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


def files_in(path: Path, count: int, write: Callable[[Path, int], object]) -> list[Path]:
    """Return ``count`` files of a folder; ``write(file, number)`` makes them if it is not there."""

    def write_all(root: Path) -> None:
        root.mkdir()
        for number in range(count):
            write(root / f"{number:05}", number)

    return sorted(written(path, write_all).iterdir())
