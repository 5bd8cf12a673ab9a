"""Tar archives, read from front to back: few calls per member, and nothing trusted."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import zlib
from collections.abc import Iterator
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

    src: the archive's bytes, or a binary file that has at least ``read``; may be compressed by
        gzip, bzip2 or xz. Links, folders and devices are skipped; nothing is ever written.
    max_member_bytes: the largest file allowed in the archive, so that a damaged or hostile one
        cannot fill the memory.
    Raises: DecodeError: not a tar archive, damaged, truncated, or with a larger file; the message
        has the name of the last good one.
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
        self._file, self._packed, self._seekable = _unpacked(file, name)
        self.is_compressed = self._packed is not None
        """Whether offsets in the tar differ from those in the file."""
        self.offset = start
        """The byte, of the decompressed tar, that is read next: after ``advance`` the first one of
        the file's content."""
        self._size = self._padding = 0  # bytes of the content that are not read yet, and behind it
        self._member = ""
        self._last_good: str | None = None
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
        self._last_good = self._member
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
            if self._seekable:
                self._file.seek(self._size - 1, io.SEEK_CUR)
                self.offset += self._size - 1
                self._size = 1
            while self._size:
                self._size -= len(self._take(min(self._size, 1 << 20), repr(self._member)))
            self._last_good = self._member
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
        except unless_of_handler(Exception) as error:
            if self._packed is None or error is self._packed.error:
                raise  # the file's own error: a lost connection is not a damaged archive
            # Every decompressor raises errors of its own classes.
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
        # and twenty times as quick as sum(). Some old programs added signed bytes.
        if zlib.adler32(header) & 0xFFFF != (rest + sum(field) + 1) % 65521 and rest != sum(
            byte - 256 * (byte > 127) for byte in header[:148] + header[156:]
        ):
            raise self._bad_header()
        return self._number(header[124:136])

    def _number(self, field: bytes) -> int:
        try:
            return int(field.rstrip(b"\0 ") or b"0", 8)
        except unless_of_handler(ValueError):
            pass
        if field[0] in (0x80, 0xFF):  # too large for octal digits: base 256, two's complement
            value = int.from_bytes(field[1:], "big")
            return value - (1 << 8 * (len(field) - 1) if field[0] == 0xFF else 0)
        try:
            return int(field.partition(b"\0")[0].strip() or b"0", 8)
        except unless_of_handler(ValueError):
            raise self._bad_header() from None

    def _cut(self, size: int, what: str, num_left: int) -> DecodeError:
        if self.offset == num_left == 0:
            return self._error("the file is empty")
        if what != _HEADER or num_left:
            return self._error(f"cut short: {what} needs {size} bytes, {num_left} are left")
        text = "it ends without the two empty blocks at its end, so files may be missing"
        return MissingEndError(str(self._error(text)))

    def _bad_header(self) -> DecodeError:
        return self._error("not a tar archive" if self.offset == _BLOCK else "a damaged header")

    def _error(self, what: str) -> DecodeError:
        good = f"after {self._last_good!r}" if self._last_good else "before any file was read"
        return DecodeError(f"{self._name}: {what} (at byte {self.offset} of the tar, {good}).")


class _Packed(io.RawIOBase):
    """A file from its beginning, and the error that reading it raised, if any."""

    def __init__(self, head: bytes, file: BinaryIO) -> None:
        self._head, self._file = head, file
        self.error: BaseException | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # only memoryviews come
        size = len(buffer)
        content, self._head = self._head[:size], self._head[size:]
        if not content:
            try:
                content = self._file.read(size)
            except BaseException as error:
                self.error = error
                raise
        buffer[: len(content)] = content
        return len(content)


def _unpacked(file: BinaryIO, name: str) -> tuple[BinaryIO, _Packed | None, bool]:
    """Return the file to read the tar from, the one it decompresses, and whether it can seek.

    The content decides, never the name.
    """
    head = file.read(6)
    if head.startswith(b"\x28\xb5\x2f\xfd"):
        raise DecodeError(
            f"{name}: compressed by zstd, which is not supported. Write the tar plain, or compress "
            "it by gzip: zstd -dc FILE | gzip > FILE.gz"
        )
    opens = next((way for magic, way in _PACKED if head.startswith(magic)), None)
    if opens is None and _sought_back(file, len(head)):
        return file, None, True
    packed = _Packed(head, file)
    buffered = io.BufferedReader(packed, 1 << 17)
    if opens is None:
        return cast("BinaryIO", buffered), None, False
    return opens(buffered), packed, False


def _sought_back(file: BinaryIO, size: int) -> bool:
    """Seek back and return whether that worked; not every file that claims to seek does."""
    try:
        if file.seekable():
            file.seek(-size, io.SEEK_CUR)
            return True
    except unless_of_handler(
        AttributeError, OSError, ValueError
    ):  # io.UnsupportedOperation is both of the last
        pass
    return False


def _gunzip(file: io.BufferedReader) -> Any:
    try:
        from isal import igzip  # inflates two to three times as fast
    except ImportError:
        return gzip.GzipFile(fileobj=file)
    return igzip.GzipFile(fileobj=file)


_PACKED: tuple[tuple[bytes, Any], ...] = (
    (b"\x1f\x8b", _gunzip),
    (b"BZh", bz2.BZ2File),
    (b"\xfd7zXZ\0", lzma.LZMAFile),
)


def _name_in(header: bytes) -> str:
    name = header[:100].partition(b"\0")[0]
    # GNU's own format ("ustar  ") keeps other fields where POSIX has the front of a long name.
    if header[257:263] == b"ustar\0" and header[345]:
        name = header[345:500].partition(b"\0")[0] + b"/" + name
    return _text(name)


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")
