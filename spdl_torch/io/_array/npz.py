"""Arrays in numpy's npz archives: stored ones are views, deflated ones are inflated on access.

A zip archive, from the end: the end record (maybe with its zip64 form before it), before that the
directory with an entry for each member, before that the members, each after a header of its own.
The directory's entries say how members are stored, their headers where the data begins; no two
members may share bytes.

Deflated members are inflated in one call without the GIL, by libdeflate where it is installed, else
by zlib. Loads per second of 1.2 MB in two members, checksums included, beside SPDL's own: smooth
pixels 1567 (libdeflate), 998 (zlib-ng), 1043 (SPDL); a photograph 371, 234, 330.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from struct import Struct, error as StructError
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from spdl_torch.errors import DecodeError

from ...checks import check_whole
from .._source import Memory, Source, memory_of, source_name
from .npy import MalformedError, view_npy

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Buffer


try:
    import deflate
except ImportError:
    deflate = None  # type: ignore[assignment]  # an extra

_STORED, _DEFLATED = 0, 8

# Only the fields in use; their names are where they are unpacked.
_END = Struct("<4s6xH2LH")
_END64_LOCATOR = Struct("<4s4xQ4x")
_END64 = Struct("<4s28x3Q")
_ENTRY = Struct("<4s4x2H4x3L3H8xL")
_HEADER = Struct("<4s22x2H")
_FIELD = Struct("<2H")
_WIDE = Struct("<Q")
_END_MAGIC, _ENTRY_MAGIC, _HEADER_MAGIC = b"PK\5\6", b"PK\1\2", b"PK\3\4"
_END64_LOCATOR_MAGIC, _END64_MAGIC = b"PK\6\7", b"PK\6\6"
_IN_ZIP64 = 0xFFFFFFFF
"""The placeholder of a number that does not fit and is in the zip64 field."""
_ZIP64 = 1
_IN_ZIP64_COUNT = 0xFFFF
_UTF8, _ENCRYPTED = 1 << 11, 1
_MOST_INFLATED = 1032
"""The most bytes for one of a deflate stream (https://zlib.net/zlib_tech.html)."""

_LARGEST_FOR_DEFLATE = 2**31 - 1
"""The largest size that the package takes: it silently truncates sizes to 32 bits."""


def load_npz(
    data: Source | Buffer, *, verify: bool = False, max_uncompressed_bytes: int = 1 << 30
) -> NpzFile:
    """Open an archive that ``numpy.savez`` or ``numpy.savez_compressed`` wrote.

    Args:
        data: as in :func:`load_npy`.
        verify: True also checks the checksum of a stored array on each access; that of a deflated
            array is always checked.
        max_uncompressed_bytes: the most bytes that all deflated arrays together may inflate to.

    Returns: a mapping of arrays by name. Only the directory has been read so far.
    Raises:
        DecodeError: not a zip archive, damaged, with equal names, or larger than
            ``max_uncompressed_bytes``.
        OSError: a path cannot be read.
        TypeError: not a source.
    """
    check_whole("load_npz", max_uncompressed_bytes=max_uncompressed_bytes, least=0)
    is_bytes = type(data) is bytes
    name = "<bytes>" if is_bytes else source_name(data)
    memory = data if is_bytes else memory_of(data, "array")
    try:
        return NpzFile(memory, name, verify, max_uncompressed_bytes)
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
        self, memory: Memory, name: str, verify: bool, max_uncompressed_bytes: int
    ) -> None:
        self._members, self._limits = _read_directory(memory)
        total = sum(each.num_bytes for each in self._members.values() if each.method != _STORED)
        if total > max_uncompressed_bytes:
            raise MalformedError(
                f"the deflated arrays take {total} bytes, more than "
                f"max_uncompressed_bytes={max_uncompressed_bytes}. Pass more if you trust the file."
            )
        self._memory = memory
        self._name = name
        self._verify = verify

    @property
    def files(self) -> list[str]:
        """The names, without ``.npy``, in the archive's order."""
        return list(self._members)

    def __getitem__(self, key: str) -> NDArray[Any]:
        """Return the array of that name.

        Raises: KeyError: no such name; DecodeError: the member is damaged or no array.
        """
        member = self._member(key)
        if member is None:
            raise KeyError(f"{key!r} is not in {self._name}, only {self.files}.")
        try:
            return self._load(member)
        except MalformedError as error:
            message = f"{self._name}: member {member.name!r}: {error}"
            raise DecodeError(message) from error.__cause__

    def __contains__(self, key: object) -> bool:
        return self._member(key) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def _member(self, key: object) -> _Member | None:
        if not isinstance(key, str):
            return None
        return self._members.get(key) or self._members.get(key.removesuffix(".npy"))

    def _load(self, member: _Member) -> NDArray[Any]:
        memory = self._memory
        start, stop = _find_data(memory, member, self._limits[member.offset])
        is_stored = member.method == _STORED
        if is_stored:
            if member.num_stored != member.num_bytes:
                raise MalformedError("it is stored, but has two sizes.")
        elif member.method == _DEFLATED:
            memory = _inflated(memoryview(memory)[start:stop], member.num_bytes)
            start, stop = 0, member.num_bytes
        else:
            raise MalformedError(
                f"it is compressed by method {member.method}; only stored (0) and deflated (8) can "
                "be loaded. Write it anew by numpy.savez or numpy.savez_compressed."
            )
        if self._verify or not is_stored:
            content = memoryview(memory)[start:stop]
            if (deflate.crc32 if deflate else zlib.crc32)(content) != member.crc:
                raise MalformedError("its checksum is wrong, the data is damaged.")
        array, end = view_npy(memory, start, stop)
        if end != stop:
            raise MalformedError(f"{stop - end} bytes follow its array.")
        return array


class _Member(NamedTuple):
    """An entry of the directory."""

    name: str
    """The name without ``.npy``."""
    raw_name: bytes
    offset: int
    """The offset of the member's header."""
    method: int
    crc: int
    num_stored: int
    """The size in bytes of the data in the archive."""
    num_bytes: int
    """The size in bytes of the inflated data."""


# -- the directory ---------------------------------------------------------------------------------


def _read_directory(memory: Memory) -> tuple[dict[str, _Member], dict[int, int]]:
    """Read the directory of an archive.

    Returns: the members by name, in the directory's order; and, by the offset of each, the offset
        at which the next one's header (or the directory) begins.
    Raises: MalformedError: not a zip archive, damaged, or with equal names.
    """
    start, stop, count = _locate_directory(memory)
    try:
        members = _read_entries(bytes(memory[start:stop]), count)
    except StructError:
        raise MalformedError("the directory is truncated.") from None
    offsets = sorted([member.offset for member in members.values()])
    if offsets and offsets[-1] >= start:
        raise MalformedError("a member begins after the last one.")
    limits = dict(zip(offsets, [*offsets[1:], start], strict=False))
    if len(limits) < count:
        raise MalformedError("two members begin at the same place.")
    return members, limits


def _locate_directory(memory: Memory) -> tuple[int, int, int]:
    """Return the start and the end of the directory, and the number of its entries."""
    end = len(memory) - _END.size  # numpy writes no comment behind it
    if end < 0 or bytes(memory[end : end + 4]) != _END_MAGIC:
        raise MalformedError("not a zip archive as numpy writes it, or truncated.")
    _, count, num_bytes, start, _ = _END.unpack_from(memory, end)
    locator = end - _END64_LOCATOR.size
    is_wide = count == _IN_ZIP64_COUNT or start + num_bytes != end
    if is_wide and locator >= 0 and bytes(memory[locator : locator + 4]) == _END64_LOCATOR_MAGIC:
        _, end = _END64_LOCATOR.unpack_from(memory, locator)
        if end + _END64.size != locator:
            raise MalformedError("the zip64 end record is not where it should be.")
        magic, count, num_bytes, start = _END64.unpack_from(memory, end)
        if magic != _END64_MAGIC:
            raise MalformedError("the zip64 end record is missing.")
    if start + num_bytes != end:
        raise MalformedError(
            f"the directory should take bytes {start} to {start + num_bytes}, but its end is at "
            f"{end}: truncated, or with other bytes put before or between."
        )
    return start, end, count


def _read_entries(entries: bytes, count: int) -> dict[str, _Member]:
    if count * _ENTRY.size > len(entries):
        raise MalformedError(f"{count} members do not fit into {len(entries)} bytes of directory.")
    members: dict[str, _Member] = {}
    at = 0
    for _ in range(count):
        entry = _ENTRY.unpack_from(entries, at)
        magic, flags, method, crc, num_stored, num_bytes, length, extra, note, offset = entry
        begin = at + _ENTRY.size
        end = begin + length
        at = end + extra + note
        if magic != _ENTRY_MAGIC or at > len(entries):
            raise MalformedError("the directory is damaged.")
        raw_name = entries[begin:end]
        name = raw_name.decode("utf-8" if flags & _UTF8 else "cp437", "replace")
        name = name.removesuffix(".npy")
        if _IN_ZIP64 in (num_bytes, num_stored, offset):
            numbers = num_bytes, num_stored, offset
            num_bytes, num_stored, offset = _wide(entries[end : end + extra], numbers)
        if name in members:
            raise MalformedError(f"two members are named {name!r}.")
        if flags & _ENCRYPTED:
            raise MalformedError(f"member {name!r} is encrypted.")
        members[name] = _Member(name, raw_name, offset, method, crc, num_stored, num_bytes)
    if at < len(entries):
        raise MalformedError(f"the directory has more than the {count} members that it should.")
    return members


def _wide(extra: bytes, numbers: tuple[int, ...]) -> list[int]:
    """Return size, stored size and offset, taking those that did not fit from the zip64 field."""
    while len(extra) >= _FIELD.size:
        kind, size = _FIELD.unpack_from(extra)
        content, extra = extra[_FIELD.size : _FIELD.size + size], extra[_FIELD.size + size :]
        if kind == _ZIP64:
            wanted = _WIDE.size * numbers.count(_IN_ZIP64)
            if len(content) < wanted:
                raise MalformedError("a zip64 field is too short.")
            wide = (number for (number,) in _WIDE.iter_unpack(content[:wanted]))
            return [next(wide) if number == _IN_ZIP64 else number for number in numbers]
    return [*numbers]


# -- a member --------------------------------------------------------------------------------------


def _find_data(memory: Memory, member: _Member, limit: int) -> tuple[int, int]:
    """Return the offsets of the start and the end of a member's data.

    Raises: MalformedError: there is no header of that name, or the data passes ``limit``, where the
        next member or the directory begins.
    """
    names = member.offset + _HEADER.size
    if names > limit:
        raise MalformedError("its header overlaps with what follows it.")
    magic, length, num_extra = _HEADER.unpack_from(memory, member.offset)
    extra = names + length
    start = extra + num_extra
    stop = start + member.num_stored
    if magic != _HEADER_MAGIC or bytes(memory[names:extra]) != member.raw_name:
        raise MalformedError("its header is missing or has another name.")
    if stop > limit:
        raise MalformedError("its data overlaps with what follows it.")
    return start, stop


def _inflated(memory: memoryview, num_bytes: int) -> Memory:
    """Return what a deflate stream inflates to, which should be ``num_bytes``: uint8 of one
    dimension, writable. Uses at most a little over twice as much memory.

    Raises: MalformedError: damaged, or of another length.
    """
    if num_bytes > _MOST_INFLATED * len(memory):  # before memory is taken for them
        raise MalformedError(f"{len(memory)} bytes never inflate to the {num_bytes} that it says.")
    too_many = f"inflates to more than the {num_bytes} bytes that the archive says."
    if deflate and max(num_bytes, len(memory)) <= _LARGEST_FOR_DEFLATE:
        try:
            content = deflate.deflate_decompress(memory, num_bytes)
        except deflate.DeflateError as error:
            raise MalformedError(f"the deflated data is damaged, or it {too_many}") from error
    else:
        stream = zlib.decompressobj(-zlib.MAX_WBITS)  # bare, without a frame of zlib's or gzip's
        try:
            # One byte more than expected, so that an overlong stream shows; copied to be writable.
            content = bytearray(stream.decompress(memory, num_bytes + 1))
        except zlib.error as error:
            raise MalformedError(f"the deflated data is damaged: {error}") from error
        if len(content) > num_bytes:
            raise MalformedError(too_many)
        if not stream.eof:
            raise MalformedError("the deflated data is truncated.")
    if len(content) != num_bytes:
        raise MalformedError(f"inflates to {len(content)} bytes, the archive says {num_bytes}.")
    return np.frombuffer(content, np.uint8)
