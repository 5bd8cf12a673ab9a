"""Open folders and files that no other user can have written: what a cache reads may run code.

Everything is opened first, without following a link, and then checked by its descriptor; what
stands in a folder is opened through the folder's. So it does not matter who exchanges names in
between.
"""

from __future__ import annotations

import errno
import os
import stat

_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_OTHER_OWNER = ("it belongs to another user", "Give a folder of your own")
_FLAGS = os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)


class UnsafePlaceError(ValueError):
    """Somebody else may have written what is there."""


def open_own_folder(path: str) -> int:
    """Return the descriptor of a folder of this user alone, made with mode 0700 if it is not there.

    Raises: UnsafePlaceError: it is a link, another user's, or open to others; OSError.
    """
    parent = os.path.dirname(path)
    if parent:
        os.makedirs(parent, mode=0o700, exist_ok=True)
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        pass
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _FLAGS)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise _unsafe(path, "it is a link or a file, not a folder", "Remove it") from error
        if error.errno == errno.EACCES and os.lstat(path).st_uid != os.geteuid():
            raise _unsafe(path, *_OTHER_OWNER) from error
        raise
    return _checked(folder, path, 0o700)


def open_own_file(folder: int, name: str, path: str) -> int:
    """Return the descriptor of a file of this user alone in an open folder, to read and write, made
    with mode 0600 if it is not there. ``path`` is for messages.

    Raises: UnsafePlaceError: it is a link, not a regular file, another user's, open to others, or
        has a second name; OSError.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | _FLAGS  # a named pipe is not waited for
    try:
        file = os.open(name, flags, 0o600, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise _unsafe(path, "it is not a regular file", "Remove it") from error
        raise
    return _checked(file, path, 0o600)


def _checked(descriptor: int, path: str, mode: int) -> int:
    """Return the descriptor of what is this user's alone; close that of anything else."""
    try:
        there = os.fstat(descriptor)
        is_folder = mode == 0o700
        if not (is_folder or stat.S_ISREG(there.st_mode)):
            raise _unsafe(path, "it is not a regular file", "Remove it")
        if there.st_uid != os.geteuid():
            raise _unsafe(path, *_OTHER_OWNER)
        if there.st_mode & _OTHERS:
            raise _unsafe(
                path,
                f"it is open to others (mode {stat.S_IMODE(there.st_mode):04o})",
                "Remove it, or give a folder on a file system that keeps permissions",
            )
        if not is_folder and there.st_nlink > 1:
            raise _unsafe(path, "it has a second name elsewhere", "Remove it")
        if stat.S_IMODE(there.st_mode) & mode != mode:  # the umask took more than others' bits
            os.fchmod(descriptor, mode)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _unsafe(path: str, why: str, advice: str) -> UnsafePlaceError:
    return UnsafePlaceError(
        f"cache: {path} is refused: {why}, and what others write there could run code here. "
        f"{advice}."
    )
