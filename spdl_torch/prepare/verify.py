"""Check shards against their indexes, and write indexes for tars that have none."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from spdl_torch.data.sources._tar_index import index_path, load_index, scan_tar
from spdl_torch.errors import DecodeError

from ..named_tuples import NamedTuple
from .plan import planned_shards
from .write import write_whole

if TYPE_CHECKING:
    from collections.abc import Iterator

    from spdl_torch.data.sources._tar_index import TarIndex


class Checked(NamedTuple):
    """One tar, read from front to back."""

    path: str
    num_samples: int
    problem: str | None
    """The fault that was found; None = none."""


def tars_in(path: str | os.PathLike[str]) -> list[str]:
    """Return a tar, or the tars in a folder, sorted, including those that its plan names and that
    are missing. Raises: ValueError: there is none.
    """
    name = os.fspath(path)
    if not os.path.isdir(name):
        if name.endswith(".tar") and os.path.isfile(name):
            return [name]
        raise ValueError(f"{name}: expected a folder of tars, or a file named *.tar.")
    found = {entry.name for entry in os.scandir(name) if entry.name.endswith(".tar")}
    found.update(planned_shards(name))
    if not found:
        raise ValueError(f"{name}: the folder has no file named *.tar.")
    return [os.path.join(name, tar) for tar in sorted(found)]


def check_tars(tars: list[str]) -> Iterator[Checked]:
    """Read each tar, and compare names, places, sizes and checksums with its index."""
    for tar in tars:
        try:
            index = load_index(tar)
            yield Checked(tar, index.num_samples, _difference(index, scan_tar(tar)))
        except FileNotFoundError as error:
            yield Checked(tar, 0, f"{error.filename} is missing")
        except (DecodeError, ValueError) as error:
            yield Checked(tar, 0, str(error))


def index_tars(tars: list[str]) -> Iterator[Checked]:
    """Write an index beside each tar that has none."""
    for tar in tars:
        if os.path.exists(index_path(tar)):
            yield Checked(tar, load_index(tar).num_samples, None)
            continue
        index = scan_tar(tar)
        write_whole(index_path(tar), index.to_json())
        yield Checked(tar, index.num_samples, None)


def _difference(index: TarIndex, found: TarIndex) -> str | None:
    """Return the first way in which a tar differs from what its index says."""
    there, expected = found.files, index.files
    for number, name in enumerate(expected.name):
        if there.name[number : number + 1] != [name]:
            return f"{name!r} is not where the index says"
        for column in ("offset", "size", "crc32"):
            value, other = getattr(expected, column)[number], getattr(there, column)[number]
            if value != other:
                return f"{name!r} is damaged: its {column} is {other}, the index says {value}"
    if len(there.name) > len(expected.name):
        return f"{there.name[len(expected.name)]!r} is not in the index"
    if (found.samples, found.num_bytes) != (index.samples, index.num_bytes):
        return "the samples are not where the index says"
    return None
