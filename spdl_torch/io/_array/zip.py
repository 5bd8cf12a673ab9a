"""The directory of a zip archive in memory.

The layout, from the end: the end record (maybe with its zip64 form before it), before that the
directory with an entry for each member, before that the members, each after a header of its own.
The directory's entries say how members are stored, their headers where the data begins; no two
members may share bytes.
"""

from __future__ import annotations

from functools import lru_cache
from struct import Struct, error as StructError
from typing import TYPE_CHECKING, NamedTuple

from .npy import MalformedError

if TYPE_CHECKING:
    from .buffer import Memory

STORED, DEFLATED = 0, 8

# Only the fields in use; their names are where they are unpacked.
_END = Struct("<4s6xH2LH")
_END64_LOCATOR = Struct("<4s4xQ4x")
_END64 = Struct("<4s28x3Q")
_ENTRY = Struct("<4s4x2H4x3L3H8xL")
_HEADER = Struct("<4s22x2H")
_FIELD = Struct("<2H")
_WIDE = [Struct(f"<{count}Q") for count in range(4)]
_END_MAGIC, _ENTRY_MAGIC, _HEADER_MAGIC = b"PK\5\6", b"PK\1\2", b"PK\3\4"
_END64_LOCATOR_MAGIC, _END64_MAGIC = b"PK\6\7", b"PK\6\6"
_IN_ZIP64 = 0xFFFFFFFF
"""The placeholder of a number that does not fit and is in the zip64 field."""
_ZIP64 = 1
_IN_ZIP64_COUNT = 0xFFFF
_LONGEST_COMMENT = 0xFFFF

_ENCRYPTED = 1 << 0 | 1 << 6 | 1 << 13
_UTF8 = 1 << 11


class Member(NamedTuple):
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


def read_directory(memory: Memory) -> tuple[dict[str, Member], dict[int, int]]:
    """Read the directory of an archive.

    Returns: the members by name, in the directory's order; and, by the offset of each, the offset
        at which the next one's header (or the directory) begins.
    Raises: MalformedError: not a zip archive, damaged, encrypted, or with equal names.
    """
    start, stop, count = _locate_directory(memory)
    try:
        members, offsets = _read_entries(bytes(memory[start:stop]), count)
    except StructError:
        raise MalformedError("the directory is truncated.") from None
    offsets.sort()
    if offsets and offsets[-1] >= start:
        raise MalformedError("a member begins after the last one.")
    limits = dict(zip(offsets, [*offsets[1:], start], strict=False))
    if len(limits) < count:
        raise MalformedError("two members begin at the same place.")
    return members, limits


def find_data(memory: Memory, member: Member, limit: int) -> tuple[int, int]:
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


def _locate_directory(memory: Memory) -> tuple[int, int, int]:
    """Return the start and the end of the directory, and the number of its entries."""
    end = _locate_end(memory)
    _, count, num_bytes, start, _ = _END.unpack_from(memory, end)
    if count == _IN_ZIP64_COUNT or start + num_bytes != end:
        end64 = end - _END64_LOCATOR.size
        if end64 >= 0 and bytes(memory[end64 : end64 + 4]) == _END64_LOCATOR_MAGIC:
            end, count, num_bytes, start = _read_end64(memory, end64)
    if start + num_bytes != end:
        raise MalformedError(
            f"the directory should take bytes {start} to {start + num_bytes}, but its end is at "
            f"{end}: truncated, or with other bytes put before or between."
        )
    return start, end, count


def _locate_end(memory: Memory) -> int:
    last = len(memory) - _END.size
    if last < 0:
        raise MalformedError(f"not a zip archive, only {len(memory)} bytes.")
    tail = bytes(memory[last:])
    if tail.startswith(_END_MAGIC) and tail.endswith(b"\0\0"):
        return last  # there is no comment, as almost always
    tail_start = max(0, last - _LONGEST_COMMENT)
    tail = bytes(memory[tail_start:])
    at = tail.rfind(_END_MAGIC)
    while at >= 0:
        comment = at + _END.size
        if comment + int.from_bytes(tail[comment - 2 : comment], "little") == len(tail):
            return tail_start + at
        at = tail.rfind(_END_MAGIC, 0, at)
    first = bytes(memory[:8])
    if first.startswith(b"\x93NUMPY"):
        raise MalformedError("not a zip archive, but a single array: use load_npy.")
    if first.startswith(_HEADER_MAGIC):
        raise MalformedError("truncated, or followed by other bytes: no zip directory at its end.")
    raise MalformedError(f"not a zip archive: it begins with {first!r}.")


def _read_end64(memory: Memory, locator: int) -> tuple[int, int, int, int]:
    _, end = _END64_LOCATOR.unpack_from(memory, locator)
    if end + _END64.size != locator:
        raise MalformedError("the zip64 end record is not where it should be.")
    magic, count, num_bytes, start = _END64.unpack_from(memory, end)
    if magic != _END64_MAGIC:
        raise MalformedError("the zip64 end record is missing.")
    return end, count, num_bytes, start


def _read_entries(entries: bytes, count: int) -> tuple[dict[str, Member], list[int]]:
    """Return the members by name, and their offsets."""
    if count * _ENTRY.size > len(entries):
        raise MalformedError(f"{count} members do not fit into {len(entries)} bytes of directory.")
    members: dict[str, Member] = {}
    offsets: list[int] = []
    new_tuple = tuple.__new__  # Member() would take half as long again as all the rest
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
        name = _name_of(raw_name, flags & _UTF8)
        if flags & _ENCRYPTED:
            raise MalformedError(f"member {name!r} is encrypted.")
        numbers = num_bytes, num_stored, offset
        if _IN_ZIP64 in numbers:
            num_bytes, num_stored, offset = _wide(entries, end, at - note, numbers)
        if name in members:
            raise MalformedError(f"two members are named {name!r}.")
        fields = name, raw_name, offset, method, crc, num_stored, num_bytes
        members[name] = new_tuple(Member, fields)
        offsets.append(offset)
    return members, offsets


@lru_cache(maxsize=1024)
def _name_of(raw_name: bytes, is_utf8: int) -> str:
    """Return the name as text, without numpy's suffix."""
    try:
        name = raw_name.decode("utf-8" if is_utf8 else "cp437")
    except UnicodeDecodeError as error:
        raise MalformedError(f"the name {raw_name!r} is not UTF-8.") from error
    return name.removesuffix(".npy")


def _wide(memory: Memory, at: int, stop: int, numbers: tuple[int, ...]) -> tuple[int, ...]:
    """Return size, stored size and offset, taking those that did not fit from the zip64 field."""
    while at + _FIELD.size <= stop:
        kind, num_bytes = _FIELD.unpack_from(memory, at)
        at += _FIELD.size
        if kind == _ZIP64:
            break
        at += num_bytes
    else:
        return numbers
    wanted = numbers.count(_IN_ZIP64)
    if num_bytes < 8 * wanted or at + num_bytes > stop:
        raise MalformedError("a zip64 field is too short.")
    wide = _WIDE[wanted].unpack_from(memory, at)
    if wanted == len(numbers):
        return wide
    rest = iter(wide)
    return tuple([next(rest) if number == _IN_ZIP64 else number for number in numbers])
