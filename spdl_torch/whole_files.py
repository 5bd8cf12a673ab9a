"""Write files that are never seen incomplete, and never through a link put there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from .scopes import scope


@scope
def whole_file(path: str | os.PathLike[str], ending: str = "") -> Iterator[BinaryIO]:
    """Open a file to write in the block; it takes its name when the block ends, and is not there if
    that fails.

    ending: what its name has until then; "" = another name beside it that nobody can foresee.
    Missing folders are made, and a file of that name is replaced. A pipe or a device is written to
    as it is. The umask sets the mode.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        with open(os.open(path, os.O_WRONLY), "wb") as file:
            yield file
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ending if ending else f".spdl-{os.urandom(8).hex()}.tmp")
    try:
        with new_file(temporary) as file:
            yield file
            # The system may crash after the rename: the name must not outlive the content.
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def new_file(path: Path) -> BinaryIO:
    """Open a file to write that was not there, in the place of whatever has its name, which is
    removed: a link is not followed.
    """
    path.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
    flags |= getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    return open(os.open(path, flags, 0o666), "wb", buffering=1 << 20)
