"""What a folder's files become: planned from their names alone, and encoded one by one."""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..command_options import CommandError
from ..errors import DecodeError
from ..io._remote import is_transient

if TYPE_CHECKING:
    from PIL.Image import Image

    Sample = tuple[int, dict[str, bytes] | Exception]
    """Its number, and its contents by the ends of their names, or why there are none."""

_Answer = TypeVar("_Answer")

_FORMAT = {"format": "spdl_torch prepared data", "version": 1}

_IMAGES = (
    *(".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp", ".gif"),
    *(".jp2", ".avif"),
)
_VIDEOS = (".mp4", ".mkv", ".webm", ".avi", ".mov", ".m4v", ".mpg", ".mpeg", ".wmv", ".flv", ".ts")
_ARRAYS = (".npy", ".npz")
_KNOWN = (*_IMAGES, *_VIDEOS, *_ARRAYS)
_FIELDS = {"jpeg": "jpg", "tiff": "tif", "mpeg": "mpg"}
_ORIENTATION = 0x0112  # of EXIF


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file, and the sample that it becomes."""

    path: str
    """Relative to the source folder, with ``/``."""
    label: int | None
    """The index of its class among the classes; None = the source has no classes."""


@dataclass(slots=True)
class ShardPlan:
    """All samples in their order: the next ``shard_samples`` are a shard."""

    folder: str
    settings: dict[str, Any]
    """``resize``, ``quality`` and ``shard_samples``."""
    classes: list[str] = field(default_factory=list)
    files: list[SourceFile] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    """Files of other kinds."""

    def shards(self) -> list[range]:
        """Return the numbers of each shard's samples."""
        most, end = self.settings["shard_samples"], len(self.files)
        return [range(first, min(first + most, end)) for first in range(0, end, most)]

    def to_json(self) -> bytes:
        """Return the content of ``dataset.json``, by which a later run recognises its plan."""
        names = ascii([file.path for file in self.files]).encode("ascii")
        content = {
            **_FORMAT,
            "num_files": len(self.files),
            "num_shards": len(self.shards()),
            "classes": self.classes,
            "settings": self.settings,
            "files_digest": hashlib.blake2b(names, digest_size=16).hexdigest(),
        }
        return json.dumps(content, indent=1).encode("ascii") + b"\n"


def make_plan(source: Path, settings: dict[str, Any]) -> ShardPlan:
    """Find the files of a folder and plan their shards.

    If there are folders in it, each is a class, as for torchvision's ImageFolder: classes are
    numbered in the order of their names, and the files of a class may lie in folders of their own.

    Raises: CommandError: no file, files beside class folders, a class without a file, or files that
        are not images where images are resized; OSError: the folder cannot be read.
    """
    if not source.is_dir():
        what = "is not a folder" if source.exists() else "does not exist"
        advice = "Give the folder of the files, or of a folder for each class."
        raise CommandError(f"{source} {what}. {advice}")
    plan = ShardPlan(os.fspath(source), settings)
    plan.classes.extend(sorted(e.name for e in _entries(plan.folder) if _answer(e.is_dir, False)))
    plan.files.extend(_files_of(plan, "", None))
    if plan.files and plan.classes:
        raise CommandError(
            f"{source}: expected files, or a folder for each class, found both: "
            f"{plan.files[0].path!r} and {plan.classes[0]!r}. Move one of them away."
        )
    for label, name in enumerate(plan.classes):
        num_before = len(plan.files)
        plan.files.extend(_files_of(plan, f"{name}/", label))
        if len(plan.files) == num_before:
            raise CommandError(
                f"{source}: the folder of class {name!r} has no image, video or array. Move it "
                "away."
            )
    if not plan.files:
        known = " ".join(sorted(_KNOWN))
        raise CommandError(f"{source}: found no image, video or array. Known: {known}.")
    others = [file.path for file in plan.files if _suffix(file.path) not in _IMAGES]
    if others and settings["resize"] is not None:
        raise CommandError(
            f"{source}: only images can be resized, found {others[0]!r}. Leave --resize out, or "
            "prepare them apart."
        )
    plan.files.sort(key=_mixed)
    return plan


def _files_of(plan: ShardPlan, prefix: str, label: int | None) -> Iterator[SourceFile]:
    """Yield the files of a folder and, below the folder of a class, those of its folders."""
    for entry in _entries(plan.folder, prefix):
        name = prefix + entry.name
        if _answer(entry.is_dir, False):
            if label is not None:
                yield from _files_of(plan, f"{name}/", label)
        elif _suffix(name) in _KNOWN:
            yield SourceFile(name, label)
        else:
            plan.ignored.append(name)


def _entries(folder: str, below: str = "") -> list[os.DirEntry[str]]:
    with os.scandir(os.path.join(folder, below)) as entries:
        found = [entry for entry in entries if not entry.name.startswith(".")]
    return sorted(found, key=lambda entry: entry.name)


def _answer(question: Callable[[], _Answer], otherwise: _Answer) -> _Answer:
    """Ask the system about an entry; ``otherwise`` = a link to nothing, or no permission."""
    try:
        return question()
    except OSError as error:
        if is_transient(error):
            raise
        return otherwise


def _suffix(path: str) -> str:
    return os.path.splitext(path)[1].lower()


def _mixed(file: SourceFile) -> tuple[bytes, str]:
    """Return the sort key: a hash shuffles alike on every machine."""
    return hashlib.blake2b(b"0\0" + os.fsencode(file.path), digest_size=16).digest(), file.path


def encode(plan: ShardPlan, number: int) -> Sample:
    """Make a sample; threads do so at once."""
    file = plan.files[number]
    path = os.path.join(plan.folder, file.path)
    try:
        with open(path, "rb") as opened:
            content = opened.read()
        if not content:
            raise DecodeError(f"{path}: the file is empty.")
        members = dict([_encoded(path, content, plan.settings)])
    except (OSError, ValueError) as error:  # DecodeError is a ValueError
        return number, error
    facts = {"file": file.path}
    if file.label is not None:
        members["cls"] = str(file.label).encode()
        facts["class"] = plan.classes[file.label]
    members["json"] = json.dumps(facts).encode("ascii")
    return number, members


def _encoded(path: str, content: bytes, settings: dict[str, Any]) -> tuple[str, bytes]:
    """Return the end of the name and the content: as they are, or as a JPEG whose shorter edge is
    ``resize``. Images that are not larger keep their size and, if JPEGs, their bytes.
    """
    kind = _FIELDS.get(_suffix(path)[1:], _suffix(path)[1:])
    most = settings["resize"]
    if most is None:
        return kind, content
    from PIL.Image import Resampling

    from ..io._image.decode import decode_image
    from ..io._image.pillow import to_pil

    file = io.BytesIO(content)
    file.name = path  # for errors to show
    image = to_pil(decode_image(file))
    shorter = min(image.size)
    if shorter <= most and kind == "jpg":
        return kind, content
    if shorter > most:
        width, height = (max(1, round(edge * most / shorter)) for edge in image.size)
        image = image.resize((width, height), Resampling.BICUBIC)
    return "jpg", _as_jpeg(image, content, settings["quality"])


def _as_jpeg(image: Image, original: bytes, quality: int) -> bytes:
    """Return a JPEG that keeps the original's EXIF orientation, which is not applied."""
    from PIL import Image as pillow

    exif = pillow.Exif()
    with pillow.open(io.BytesIO(original)) as opened:
        orientation = opened.getexif().get(_ORIENTATION, 1)
    if orientation != 1:
        exif[_ORIENTATION] = orientation
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=quality, **({"exif": exif} if exif else {}))
    return buffer.getvalue()
