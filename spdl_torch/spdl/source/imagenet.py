"""ImageNet's folders as a source of paths and labels."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from .local_directory import LocalDirectory

__all__ = ["ImageNet", "get_mappings", "parse_wnid"]

_SPLITS = ("train", "val")
_WNID = re.compile(r"n\d{8}")


class ImageNet:
    """``(path, label)`` of every ``SPLIT/<wnid>/*.JPEG``; sorted, until :meth:`shuffle` is called.

    Args:
        root: the folder with ``train`` and ``val``.
        split: one of these two.

    Raises: FileNotFoundError: there are no such files; ValueError: another split; later, a folder
        that is not one of ImageNet's.
    """

    def __init__(self, root: str | os.PathLike[str], split: str = "val") -> None:
        if split not in _SPLITS:
            raise ValueError(f"ImageNet: split must be one of {', '.join(_SPLITS)}, got {split!r}.")
        self._labels = get_mappings()
        self._paths = LocalDirectory(root, f"{split}/*/*.JPEG")

    def __len__(self) -> int:
        return len(self._paths)

    def __iter__(self) -> Iterator[tuple[Path, int]]:
        for path in self._paths:
            wnid = parse_wnid(path.parent.name)
            if wnid not in self._labels:
                raise ValueError(f"ImageNet: {wnid} is none of the 1000 classes, of {path}.")
            yield path, self._labels[wnid]

    def shuffle(self, seed: int) -> None:
        """Shuffle as :class:`LocalDirectory` does."""
        self._paths.shuffle(seed)


def parse_wnid(s: str) -> str:
    """Return the first number of WordNet, such as ``n01440764``, in a text.

    Raises: ValueError: there is none.
    """
    found = _WNID.search(s)
    if found is None:
        raise ValueError(f"parse_wnid: no WordNet number, such as n01440764, in {s!r}.")
    return found[0]


def get_mappings() -> dict[str, int]:
    """Return the labels, 0 to 999, by the classes' numbers in WordNet."""
    wnids = Path(__file__).with_name("wnids.txt").read_text("ascii").split()
    return {wnid: label for label, wnid in enumerate(wnids)}
