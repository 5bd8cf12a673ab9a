"""Encode one file into the members of its sample."""

from __future__ import annotations

import errno
import io
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from spdl_torch.errors import DecodeError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from PIL.Image import Image

    from .plan import Settings, ShardPlan, SourceFile

_ORIENTATION = 0x0112
_KINDS = {"jpeg": "jpg", "tiff": "tif", "mpeg": "mpg"}


@dataclass(frozen=True, slots=True)
class Sample:
    """The members of a sample, or the reason why there are none."""

    number: int
    members: Mapping[str, bytes] = field(default_factory=dict)
    """The contents by the ends of their names."""
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
            kind, content = _encoded(path, content, self._plan.settings)
        except (OSError, ValueError) as error:  # DecodeError is a ValueError
            return Sample(number, error=_told_apart(error, path))
        members = {kind: content}
        facts: dict[str, object] = {"file": file.path}
        if file.label is not None:
            members["cls"] = str(file.label).encode()
            facts["class"] = self._plan.classes[file.label]
        members["json"] = json.dumps(facts).encode("ascii")
        return Sample(number, members)


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


def _encoded(path: str, content: bytes, settings: Settings) -> tuple[str, bytes]:
    """Return the end of the name and the content: as they are, or as a JPEG whose shorter edge is
    ``settings.resize``. Images that are not larger keep their size and, if JPEGs, their bytes.
    """
    suffix = Path(path).suffix.lower()[1:]
    kind = _KINDS.get(suffix, suffix)
    if settings.resize is None:
        return kind, content
    from PIL.Image import Resampling

    from spdl_torch.io._image.decode import decode_image, to_pil

    file = io.BytesIO(content)
    file.name = path  # for errors to show
    image = to_pil(decode_image(file))
    shorter = min(image.size)
    if shorter > settings.resize:
        width, height = (max(1, round(edge * settings.resize / shorter)) for edge in image.size)
        image = image.resize((width, height), Resampling.BICUBIC)
    elif kind == "jpg":
        return kind, content
    return "jpg", _as_jpeg(image, content, settings.quality)


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
