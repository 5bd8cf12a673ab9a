"""Tar archives, read from front to back: few calls per member, and nothing trusted."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, cast

from spdl_torch.errors import DecodeError
from spdl_torch.handlers import unless_of_handler

DEFAULT_MAX_BYTES = 1 << 30
"""The largest member: far above any sample, far below what takes a machine down."""

_BLOCK = 512
_END = bytes(_BLOCK)
_HEADER = "a header"
_MAX_NAME_BYTES = 1 << 20
_MAX_TAIL_BYTES = 1 << 20  # read after the end of a compressed archive, for its checksum


def iter_tarfile(
    src: bytes | bytearray | memoryview | BinaryIO, *, max_member_bytes: int = DEFAULT_MAX_BYTES
) -> Iterator[tuple[str, bytes]]:
    """Yield the files of a tar archive, in its order: ``(name, content)``.

    src: the archive's bytes, or a binary file that can seek or ``peek``, as ``io.BufferedReader``
        makes of others; may be compressed by gzip, bzip2 or xz. Links, folders and devices are
        skipped; nothing is ever written.
    max_member_bytes: the largest file allowed in the archive, so that a damaged or hostile one
        cannot fill the memory.
    Raises: DecodeError: not a tar archive, damaged, truncated, or with a larger file; the message
        has the byte.
    """
    if isinstance(src, bytes | bytearray | memoryview):
        src, name = cast("BinaryIO", io.BytesIO(src)), "<bytes>"
    elif isinstance(src, str | os.PathLike):
        raise TypeError(
            f"iter_tarfile: expected bytes or an open file, got {src!r}. Open it: 'rb'."
        )
    else:
        name = str(getattr(src, "name", "<file object>"))
    reader = TarReader(src, name, max_member_bytes=max_member_bytes)
    while (member := reader.advance()) is not None:
        yield member[0], reader.content()


class MissingEndError(DecodeError):
    """The archive ends after a whole file, without the two empty blocks that should follow."""


class TarReader:
    """Walks over the files of one archive; the caller reads or skips the content of each.

    advance() -> (name, size); content() -> bytes, at most once; advance() ... None at the end.

    start: the byte of the tar with which ``file`` begins, for messages.
    """

    def __init__(
        self,
        file: BinaryIO,
        name: str,
        *,
        max_member_bytes: int = DEFAULT_MAX_BYTES,
        start: int = 0,
    ) -> None:
        self._name = name
        self._max_bytes = max_member_bytes
        self._file, self.is_compressed = _unpacked(file)
        """The second: whether offsets in the tar differ from those in the file."""
        self._can_skip = not self.is_compressed and file.seekable()
        self.offset = start
        """The byte, of the decompressed tar, that is read next: after ``advance`` the first one of
        the file's content."""
        self._size = self._padding = 0  # bytes of the content that are not read yet, and behind it
        self._member = ""
        self._defaults: dict[str, str] = {}  # for all members (pax global headers)

    @property
    def has_shared_headers(self) -> bool:
        """Whether one name or size applies to all files at once, so that none stands alone."""
        return not self._defaults.keys().isdisjoint(("path", "size"))

    def advance(self) -> tuple[str, int] | None:
        """Go to the next file of the archive; None at the archive's end."""
        extra: dict[str, str] = {}
        while True:
            self._skip()
            header = self._take(_BLOCK, _HEADER)
            if header == _END:
                self._read_tail()
                return None
            size, kind = self._checked_size(header), header[156]
            if kind == 0x30 and not extra and not self._defaults:  # "0": a file, nothing unusual
                return self._enter(_name_in(header), size)
            if kind in b"LKxXg":  # not members: they describe the next one
                self._describe(kind, size, extra)
                continue
            described, extra = {**self._defaults, **extra}, {}
            name = described.get("path") or _name_in(header)
            if digits := described.get("size"):
                if not (digits.isascii() and digits.isdigit() and len(digits) < 20):
                    raise self._error(f"a damaged size, {digits[:20]!r}")
                size = int(digits)
            if kind == 0x53 or any(key.startswith("GNU.sparse") for key in described):
                raise self._error(f"{name!r} is a sparse file, which is not supported")
            if kind in b"0\x007" and not (kind == 0 and name.endswith("/")):
                return self._enter(name, size)
            # Folders, links and devices have no content, whatever size they claim. Unknown kinds
            # are read past as files, as POSIX asks.
            if kind not in b"\x00123456":
                self._enter(name, size)

    def content(self) -> bytes:
        """Read the content of the file that advance() named."""
        size, self._size = self._size, 0
        content = self._take(size, repr(self._member)) if size else b""
        self._skip()
        return content

    def _enter(self, name: str, size: int) -> tuple[str, int]:
        if not 0 <= size <= self._max_bytes:
            raise self._error(f"{name!r} claims {size} bytes; the limit is {self._max_bytes}")
        self._member, self._size, self._padding = name, size, -size % _BLOCK
        return name, size

    def _describe(self, kind: int, size: int, extra: dict[str, str]) -> None:
        if not 0 <= size <= _MAX_NAME_BYTES:
            raise self._error(f"a name claims {size} bytes; the limit is {_MAX_NAME_BYTES}")
        block = self._take(size, "a long name")
        self._padding = -size % _BLOCK
        if kind == 0x4C:  # "L": the next member's name; "K" is that of a link's target
            extra["path"] = _text(block.partition(b"\0")[0])
        elif kind != 0x4B:
            (self._defaults if kind == 0x67 else extra).update(self._records(block))

    def _records(self, block: bytes) -> Iterator[tuple[str, str]]:
        """Parse the records of an extended header: ``b"19 path=long/name...\\n"`` and so on."""
        start = 0
        while start < len(block) and block[start] != 0:
            digits = block[start : start + 20].partition(b" ")[0]
            length = int(digits) if digits.isdigit() else 0
            record = block[start : start + length]
            start += length
            key, equals, value = record[len(digits) + 1 : -1].partition(b"=")
            if not equals or len(record) != length or record[-1:] != b"\n":
                raise self._error("a damaged extended header")
            yield _text(key), _text(value)

    def _skip(self) -> None:
        """Pass what is left of a file, and what fills its last block."""
        if self._size:
            # All but the last byte: only reading that one shows that it is there.
            if self._can_skip:
                self._file.seek(self._size - 1, io.SEEK_CUR)
                self.offset += self._size - 1
                self._size = 1
            while self._size:
                self._size -= len(self._take(min(self._size, 1 << 20), repr(self._member)))
        if self._padding:
            padding, self._padding = self._padding, 0
            self._take(padding, "padding")

    def _take(self, size: int, what: str) -> bytes:
        content = self._read(size)
        if len(content) < size:
            parts, left = [content], size - len(content)
            while left and (part := self._read(left)):  # a file may return less than asked
                parts.append(part)
                left -= len(part)
            content = b"".join(parts)
            if left:
                raise self._cut(size, what, len(content))
        self.offset += size
        return content

    def _read(self, size: int) -> bytes:
        try:
            return self._file.read(size)
        except unless_of_handler(*_DAMAGE, OSError) as error:
            # The file's own error is none of damage: a lost connection. That of bzip2 has no class.
            is_bzip2s = type(error) is OSError and error.errno is None
            if not self.is_compressed or not (isinstance(error, _DAMAGE) or is_bzip2s):
                raise
            raise self._error(f"cannot be decompressed: {error}") from error

    def _read_tail(self) -> None:
        left = _MAX_TAIL_BYTES if self.is_compressed else 0  # its checksum comes last
        while left > 0 and (tail := self._read(1 << 16)):
            left -= len(tail)

    def _checked_size(self, header: bytes) -> int:
        """Return the size that a header gives, once its checksum is right."""
        field = header[148:156]
        rest = self._number(field) - 8 * 0x20
        # The low half of Adler-32 is the sum of the bytes plus one, modulo 65521: as good a check,
        # and twenty times as quick as sum().
        if zlib.adler32(header) & 0xFFFF != (rest + sum(field) + 1) % 65521:
            raise self._bad_header()
        return self._number(header[124:136])

    def _number(self, field: bytes) -> int:
        if field[0] == 0x80:  # too large for octal digits: base 256
            return int.from_bytes(field[1:], "big")
        try:
            return int(field.partition(b"\0")[0].strip() or b"0", 8)
        except unless_of_handler(ValueError):
            raise self._bad_header() from None

    def _cut(self, size: int, what: str, num_left: int) -> DecodeError:
        if what != _HEADER or num_left:
            return self._error(f"cut short: {what} needs {size} bytes, {num_left} are left")
        text = "it ends without the two empty blocks at its end, so files may be missing"
        return MissingEndError(str(self._error(text)))

    def _bad_header(self) -> DecodeError:
        return self._error("not a tar archive" if self.offset == _BLOCK else "a damaged header")

    def _error(self, what: str) -> DecodeError:
        return DecodeError(f"{self._name}: {what} (at byte {self.offset} of the tar).")


def _unpacked(file: BinaryIO) -> tuple[BinaryIO, bool]:
    """Return the file to read the tar from, and whether that decompresses the one that is given.

    The content decides, never the name.
    """
    if file.seekable():
        head = file.read(_HEAD_BYTES)
        file.seek(-len(head), io.SEEK_CUR)
    else:
        head = cast("io.BufferedReader", file).peek(_HEAD_BYTES)
    opens = next((way for magic, way in _PACKED if head.startswith(magic)), None)
    return (file, False) if opens is None else (opens(file), True)


_HEAD_BYTES = 6
_PACKED: tuple[tuple[bytes, Callable[..., Any]], ...] = (
    (b"\x1f\x8b", lambda file: gzip.GzipFile(fileobj=file)),
    (b"BZh", bz2.BZ2File),
    (b"\xfd7zXZ\0", lzma.LZMAFile),
)
_DAMAGE = (zlib.error, gzip.BadGzipFile, lzma.LZMAError, EOFError)


def _name_in(header: bytes) -> str:
    name = header[:100].partition(b"\0")[0]
    # GNU's own format ("ustar  ") keeps other fields where POSIX has the front of a long name.
    if header[257:263] == b"ustar\0" and header[345]:
        name = header[345:500].partition(b"\0")[0] + b"/" + name
    return _text(name)


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")
