"""Names of files: found by patterns, or listed in a file."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from spdl_torch.io._remote import Reader, glob_url, is_url
from spdl_torch.io._retry import RETRIES

from ._base import ListSource, names_in
from ._shard import KeptFile, ShardFiles, shard_files

_ANY_FOLDERS = re.compile(rf"(^|[/{re.escape(os.sep)}])\*\*([/{re.escape(os.sep)}]|$)")


class Files(ListSource[str]):
    """Paths or URLs of the files that match, each once, sorted by name.

    patterns: one or more paths, folders, or globs with ``*``, ``?``, ``[abc]`` and ``**`` (any
        number of folders); or URLs with the same, if fsspec can list them. Names that begin with
        a dot match only if the pattern has the dot too.
    suffixes: keep names with one of these endings, in any case, such as ``{".jpg", ".jpeg"}``.
    recursive: include the files in the folders below a folder. Here and for ``**`` each folder is
        read once, however many links lead to it, also in circles.
    storage_options: options of fsspec's file system, for URLs.
    cache, max_bytes, ahead: keep whole files of URLs on a local disk, as :class:`TarShards`. What
        of spdl_torch reads such a name reads the copy, and ``name.open()`` opens it for others.

    The names are found once, here. Raises: FileNotFoundError: a pattern matches no file;
    ValueError: ``cache`` for a file that is no URL.
    """

    _files: ShardFiles

    def __init__(
        self,
        patterns: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        suffixes: Collection[str] | None = None,
        recursive: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        cache: str | os.PathLike[str] | None = None,
        max_bytes: float | None = None,
        ahead: int = 2,
    ) -> None:
        self._files = shard_files("Files", storage_options or {}, RETRIES, cache, max_bytes, ahead)
        if isinstance(suffixes, str):
            raise TypeError(f"Files: suffixes must be a collection of them, got {suffixes!r}.")
        ends = None if suffixes is None else tuple(suffix.lower() for suffix in suffixes)
        found: set[str] = set()
        for pattern in names_in("Files", patterns):
            names = find_files(pattern, recursive, storage_options)
            if ends is not None:
                names = [name for name in names if name.lower().endswith(ends)]
            if not names:
                raise nothing_found("Files", pattern, ends)
            found.update(names)
        files = sorted(found)
        if self._files.copies is not None:
            if local := [name for name in files if not is_url(name)]:
                raise ValueError(
                    f"Files: cache= keeps files of URLs, got {local[0]!r}. A slow disk's files "
                    "have URLs, too: file:///FOLDER/*.mp4"
                )
            files = [KeptFile(url, self._files) for url in files]
        super().__init__(files)

    def iterate(self, start: int = 0) -> Iterator[str]:
        """Iterate from position ``start`` on, while the next files are fetched for ``cache``."""
        names = super().iterate(start)
        return names if self._files.copies is None else self._files.each([*names])


class FileList(ListSource[str]):
    """The paths or URLs that a text file lists, one a line, in its order.

    path: the path or URL of the list, in UTF-8. White space around a line and empty lines are left
        out. Every other line is a path, also one that begins with ``#``, unless ``comment="#"``.
    prefix: a folder or URL put in front of every path that is neither absolute nor a URL.
    split: ``(k, n)`` keeps the lines whose number, from 0, has ``number % n == k``; empty lines
        and comments count too.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        prefix: str | os.PathLike[str] = "",
        split: tuple[int, int] | None = None,
        comment: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        k, n = (0, 1) if split is None else split
        if not 0 <= k < n:
            raise ValueError(f"FileList: split must be (k, n) with 0 <= k < n, got {split}.")
        content: bytes = Reader(storage_options=storage_options)(path)
        # Names that are not UTF-8 reach open() unchanged; "sig" is for lists from Windows.
        lines = content.decode("utf-8-sig", "surrogateescape").split("\n")[k::n]
        names = [name for line in lines if (name := line.strip())]
        if comment is not None:
            names = [name for name in names if not name.startswith(comment)]
        front = os.fspath(prefix)
        if front:
            front += "" if front.endswith(("/", os.sep)) else "/"
            names = [
                name if os.path.isabs(name) or is_url(name) else front + name for name in names
            ]
        super().__init__(names)


def find_files(
    pattern: str, recursive: bool, storage_options: Mapping[str, Any] | None
) -> list[str]:
    """Return the files that a path, a folder, a glob or a URL names, if any."""
    if is_url(pattern):
        names = glob_url(pattern, storage_options)
        if not names and not glob.has_magic(pattern):
            below = "/**" if recursive else "/*"
            names = glob_url(pattern.rstrip("/") + below, storage_options)
        return names
    if os.path.isdir(pattern):
        walk = islice(_folders(pattern, _raise), None if recursive else 1)
        return [
            os.path.join(path, name) for path, names in walk for name in names if name[0] != "."
        ]
    if os.path.exists(pattern):  # even if the name itself has brackets
        return [pattern]
    return [name for name in {*_matching(pattern)} if not os.path.isdir(name)]


def _matching(pattern: str) -> Iterator[str]:
    """Yield what a glob matches, where ``**`` visits every folder once."""
    split = _ANY_FOLDERS.search(pattern)
    if split is None:
        yield from glob.iglob(pattern)
        return
    front, rest = pattern[: split.end(1)], pattern[split.end() :]
    for top in glob.iglob(front) if front else ["."]:
        for folder, _ in _folders(top, None):
            inner = os.path.join(glob.escape(folder), rest or "*")
            yield from _matching(inner if front else inner.removeprefix(os.path.join(".", "")))


def _folders(
    top: str, on_error: Callable[[OSError], object] | None
) -> Iterator[tuple[str, list[str]]]:
    """Yield a folder and those below it, with the names of their files: each folder once, by its
    own name if it has one here rather than by that of a link.
    """
    seen, tops = set(), [top]
    for begin in tops:  # links to folders are added
        for path, folders, files in os.walk(begin, onerror=on_error):
            there = os.stat(path)
            if (there.st_dev, there.st_ino) in seen:
                folders.clear()
                continue
            seen.add((there.st_dev, there.st_ino))
            folders[:] = sorted(name for name in folders if name[0] != ".")
            paths = (os.path.join(path, name) for name in folders)
            tops += [path for path in paths if os.path.islink(path)]
            yield path, files


def _raise(error: OSError) -> None:
    raise error


def nothing_found(who: str, pattern: str, ends: tuple[str, ...] | None = None) -> FileNotFoundError:
    """Return the error for a pattern without files, with the nearest folder that exists."""
    ending = f" with an ending of {', '.join(ends)}" if ends is not None else ""
    hint = ""
    if not is_url(pattern):
        hint = f" The current folder is {os.getcwd()!r}."
        folder = pattern
        while folder and not os.path.isdir(folder):
            folder = os.path.dirname(folder.rstrip("/"))
        if folder:
            hint = f" {folder!r} is there, with {len(os.listdir(folder))} entries."
            if os.path.isdir(pattern):
                how = "recursive=True" if who == "Files" else "A glob with **"
                hint += f" {how} looks into the folders below."
    return FileNotFoundError(f"{who}: no file{ending} matches {pattern!r}.{hint}")
