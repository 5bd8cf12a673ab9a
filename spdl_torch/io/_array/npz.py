"""Arrays in numpy's npz archives: stored ones are views, deflated ones are inflated on access."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from spdl_torch.errors import DecodeError

from .buffer import memory_name, open_memory
from .inflate import crc32, inflate
from .npy import MalformedError, view_npy
from .zip import DEFLATED, STORED, find_data, read_directory

if TYPE_CHECKING:
    from typing import Self

    from numpy.typing import NDArray
    from typing_extensions import Buffer

    from .._source import Source
    from .buffer import Memory
    from .zip import Member


def load_npz(
    data: Source | Buffer,
    *,
    copy: bool = False,
    verify: bool = False,
    max_uncompressed_bytes: int = 1 << 30,
) -> NpzFile:
    """Open an archive that ``numpy.savez`` or ``numpy.savez_compressed`` wrote.

    Args:
        data: as in :func:`load_npy`.
        copy: True copies every array, which is then aligned and writable.
        verify: True also checks the checksum of a stored array on each access; that of a deflated
            array is always checked.
        max_uncompressed_bytes: the most bytes that all deflated arrays together may inflate to.

    Returns: a mapping of arrays by name. Only the directory has been read so far.
    Raises:
        DecodeError: not a zip archive, damaged, encrypted, with equal names, or larger than
            ``max_uncompressed_bytes``.
        OSError: a path cannot be read.
        TypeError: not a source.
    """
    if max_uncompressed_bytes < 0:
        raise ValueError(f"max_uncompressed_bytes must be >= 0, got {max_uncompressed_bytes}.")
    name = "<bytes>" if type(data) is bytes else memory_name(data)
    memory = open_memory(data)
    try:
        return NpzFile(memory, name, copy, verify, max_uncompressed_bytes)
    except MalformedError as error:
        raise DecodeError(f"{name}: {error}") from error.__cause__


class NpzFile(Mapping[str, "NDArray[Any]"]):
    """The arrays of an npz archive by name; made by :func:`load_npz`.

    Each access makes the array anew, so keep it rather than accessing it twice. Stored arrays view
    the source's memory, read-only if that is; deflated ones own their memory and are writable.
    Names work with and without ``.npy``. Any number of threads may use it at once.

    As a context manager it does nothing: there is no file to close.
    """

    def __init__(
        self, memory: Memory, name: str, copy: bool, verify: bool, max_uncompressed_bytes: int
    ) -> None:
        self._members, self._limits = read_directory(memory)
        _check_sizes(self._members.values(), max_uncompressed_bytes)
        self._memory = memory
        self._name = name
        self._copy = copy
        self._verify = verify

    @property
    def files(self) -> list[str]:
        """The names, without ``.npy``, in the archive's order."""
        return list(self._members)

    def __getitem__(self, key: str) -> NDArray[Any]:
        """Return the array of that name.

        Raises: KeyError: no such name; DecodeError: the member is damaged or no array.
        """
        members = self._members
        if key not in members:
            key = key.removesuffix(".npy")
        if key not in members:
            raise KeyError(f"{key!r} is not in {self._name}, only {self.files}.")
        try:
            return self._load(members[key])
        except MalformedError as error:
            message = f"{self._name}: member {key!r}: {error}"
            raise DecodeError(message) from error.__cause__

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and (
            key in self._members or key.removesuffix(".npy") in self._members
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)

    def __repr__(self) -> str:
        return f"NpzFile {self._name!r} with {', '.join(self.files) or 'no arrays'}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def _load(self, member: Member) -> NDArray[Any]:
        memory = self._memory
        start, stop = find_data(memory, member, self._limits[member.offset])
        if member.method == STORED:
            if member.num_stored != member.num_bytes:
                raise MalformedError("it is stored, but has two sizes.")
        elif member.method == DEFLATED:
            memory = inflate(memoryview(memory)[start:stop], member.num_bytes)
            start, stop = 0, member.num_bytes
        else:
            known = _METHODS.get(member.method)
            raise MalformedError(
                f"it is compressed by {f'{known}, ' if known else ''}method {member.method}; only "
                "stored (0) and deflated (8) can be loaded. Write it anew by numpy.savez or "
                "numpy.savez_compressed."
            )
        is_ours = member.method != STORED
        if (is_ours or self._verify) and crc32(memoryview(memory)[start:stop]) != member.crc:
            raise MalformedError("its checksum is wrong, the data is damaged.")
        array, end = view_npy(memory, start, stop)
        if end != stop:
            raise MalformedError(f"{stop - end} bytes follow its array.")
        return array.copy(order="K") if self._copy and not is_ours else array


_METHODS = {9: "Deflate64", 12: "bzip2", 14: "LZMA", 20: "Zstandard", 93: "Zstandard", 95: "XZ"}


def _check_sizes(members: Iterable[Member], max_uncompressed_bytes: int) -> None:
    total = 0
    for member in members:
        if member.method != STORED:
            total += member.num_bytes
    if total > max_uncompressed_bytes:
        raise MalformedError(
            f"the deflated arrays take {total} bytes, more than "
            f"max_uncompressed_bytes={max_uncompressed_bytes}. Pass more if you trust the file."
        )
