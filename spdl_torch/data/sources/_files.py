"""Names of files, found by patterns."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

from spdl_torch.io._remote import RETRIES, glob_url, is_url

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
        self._copies = frozenset(filter(None, [self._files.copies]))
        if isinstance(suffixes, str):
            raise TypeError(f"Files: suffixes must be a collection of them, got {suffixes!r}.")
        ends = None if suffixes is None else tuple(suffix.lower() for suffix in suffixes)
        options = recursive, storage_options, ends
        named = [find_files("Files", pattern, *options) for pattern in names_in(patterns)]
        files = sorted({*chain.from_iterable(named)})
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


def find_files(
    who: str,
    pattern: str,
    recursive: bool,
    storage_options: Mapping[str, Any] | None,
    ends: tuple[str, ...] | None = None,
) -> list[str]:
    """Return the files that a path, a folder, a glob or a URL names, sorted.

    ends: the endings, in lower case, of those to keep of a folder.
    Raises: FileNotFoundError: there is none.
    """
    names = _named(pattern, recursive, storage_options)
    if names == [pattern] or glob.has_magic(pattern):
        ends = None  # they are named, and not a folder's
    if ends is not None:
        names = [name for name in names if name.lower().endswith(ends)]
    if not names:
        ending = f" with an ending of {', '.join(ends)}" if ends is not None else ""
        raise FileNotFoundError(f"{who}: no file{ending} matches {pattern!r}.")
    return sorted(names)


def _named(pattern: str, recursive: bool, storage_options: Mapping[str, Any] | None) -> list[str]:
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
    """Yield a folder and those below it, with the names of their files: each folder once."""
    seen = set()
    for path, folders, files in os.walk(top, onerror=on_error, followlinks=True):
        there = os.path.realpath(path)
        if there in seen:
            folders.clear()
            continue
        seen.add(there)
        folders[:] = sorted(name for name in folders if name[0] != ".")
        yield path, files


def _raise(error: OSError) -> None:
    raise error
