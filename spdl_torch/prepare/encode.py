"""Encode one file into the members of its sample."""

from __future__ import annotations

import errno
import io
import json
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from spdl_torch.errors import DecodeError

from ..named_tuples import NamedTuple

if TYPE_CHECKING:
    from PIL.Image import Image

    from .plan import Settings, ShardPlan, SourceFile

_ORIENTATION = 0x0112
_FIELDS = {"jpeg": "jpg", "tiff": "tif", "mpeg": "mpg"}


class Member(NamedTuple):
    """One file of a sample."""

    field: str
    content: bytes
    crc32: int


@dataclass(frozen=True, slots=True)
class Sample:
    """The members of a sample, or the reason why there are none."""

    number: int
    members: tuple[Member, ...] = ()
    error: Exception | None = None


class Encoder:
    """Makes samples by their numbers in a plan; threads may call it at once."""

    def __init__(self, plan: ShardPlan) -> None:
        self._plan = plan

    def __call__(self, number: int) -> Sample:
        """Return the sample; its ``error`` is set if the file cannot be read or decoded."""
        file = self._plan.files[number]
        path = os.path.join(self._plan.folder, file.path)
        try:
            with open(path, "rb") as opened:
                content = opened.read()
                _check_unchanged(file, os.fstat(opened.fileno()), path)
            field, content = _encoded(path, content, self._plan.settings)
        except (OSError, ValueError) as error:  # DecodeError is a ValueError
            return Sample(number, error=_told_apart(error, path))
        members = [_member(field, content)]
        facts: dict[str, object] = {"file": file.path}
        if file.label is not None:
            members.append(_member("cls", str(file.label).encode()))
            facts["class"] = self._plan.classes[file.label]
        members.append(_member("json", json.dumps(facts).encode("ascii")))
        return Sample(number, tuple(members))


def encoder_versions(settings: Settings) -> str:
    """Return the libraries that the bytes depend on; empty if files are copied."""
    if settings.resize is None:
        return ""
    import PIL
    import torchvision
    from PIL import features

    return (
        f"torchvision {torchvision.__version__}, Pillow {PIL.__version__}, "
        f"libjpeg {features.version('jpg')}, bicubic"
    )


def _check_unchanged(file: SourceFile, found: os.stat_result, path: str) -> None:
    if found.st_size == 0:
        raise DecodeError(f"{path}: the file is empty.")
    if (found.st_size, found.st_mtime_ns) != (file.num_bytes, file.mtime_ns):
        raise ValueError(
            f"{path}: the file has changed since the run began. Let nothing write to the folder "
            "while it is prepared, and begin anew in another one."
        )


def _told_apart(error: Exception, path: str) -> Exception:
    """Return the error; another for a link to nothing, whose name is not missing."""
    is_broken = isinstance(error, OSError) and error.errno in (errno.ENOENT, errno.ELOOP)
    if not (is_broken and os.path.islink(path)):
        return error
    broken = DecodeError(
        f"{path}: a link to nothing: there is no file at {os.readlink(path)!r}. Mend or remove it."
    )
    broken.__cause__ = error
    return broken


def _member(field: str, content: bytes) -> Member:
    return Member(field, content, zlib.crc32(content))


def _encoded(path: str, content: bytes, settings: Settings) -> tuple[str, bytes]:
    """Return the field and the content: as they are, or as a JPEG whose shorter edge is
    ``settings.resize``. Images that are not larger keep their size and, if JPEGs, their bytes.
    """
    suffix = Path(path).suffix.lower()[1:]
    field = _FIELDS.get(suffix, suffix)
    if settings.resize is None:
        return field, content
    from spdl_torch.io._image.decode import decode_image, to_pil

    image = to_pil(decode_image(_named(content, path)))
    width, height = image.size
    shorter = min(width, height)
    if shorter <= settings.resize:
        if field == "jpg":
            return field, content
        return "jpg", _as_jpeg(image, content, settings.quality)
    width, height = (max(1, round(edge * settings.resize / shorter)) for edge in image.size)
    return "jpg", _as_jpeg(_resized(image, width, height), content, settings.quality)


def _named(content: bytes, path: str) -> io.BytesIO:
    """Return the content as a file, with a name for errors to show."""
    file = io.BytesIO(content)
    file.name = path
    return file


def _resized(image: Image, width: int, height: int) -> Image:
    from PIL.Image import Resampling

    return image.resize((width, height), Resampling.BICUBIC)


def _as_jpeg(image: Image, original: bytes, quality: int) -> bytes:
    """Return a JPEG that keeps the original's EXIF orientation, which is not applied."""
    from PIL import Image as pillow

    options = {}
    with pillow.open(io.BytesIO(original)) as opened:
        orientation = opened.getexif().get(_ORIENTATION, 1)
    if orientation != 1:
        exif = pillow.Exif()
        exif[_ORIENTATION] = orientation
        options["exif"] = exif
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=quality, **options)
    return buffer.getvalue()
