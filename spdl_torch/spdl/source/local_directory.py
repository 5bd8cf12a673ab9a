"""The files of a folder as a source."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

__all__ = ["LocalDirectory"]


class LocalDirectory:
    """Paths below a folder that match a pattern; sorted, until :meth:`shuffle` is called.

    They are looked for once, when this object is made.

    Args:
        root: the folder.
        pattern: of ``pathlib.Path.glob``, such as ``**/*.mp4``.

    Raises: FileNotFoundError: nothing matches.
    """

    def __init__(self, root: str | os.PathLike[str], pattern: str) -> None:
        self.root = Path(root)
        self.pattern = pattern
        self._sorted = sorted(self.root.glob(pattern))
        if not self._sorted:
            raise FileNotFoundError(f"LocalDirectory: nothing in {self.root} matches {pattern!r}.")
        self._paths = self._sorted

    def __len__(self) -> int:
        return len(self._sorted)

    def __iter__(self) -> Iterator[Path]:
        return iter(self._paths)

    def shuffle(self, seed: int) -> None:
        """Make iterations from now on use the order of ``seed``, whatever came before. The first
        time it is that of SPDL's LocalDirectory.
        """
        paths = self._sorted.copy()
        random.Random(seed).shuffle(paths)
        self._paths = paths
