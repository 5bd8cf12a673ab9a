"""Plan which file becomes which sample in which shard, from names and sizes alone."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spdl_torch.io._retry import is_transient

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

PLAN_FILE = "dataset.json"
"""The file of a plan, beside the shards."""


IMAGES = (
    *(".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp", ".gif"),
    *(".jp2", ".avif"),
)
_VIDEOS = (".mp4", ".mkv", ".webm", ".avi", ".mov", ".m4v", ".mpg", ".mpeg", ".wmv", ".flv", ".ts")
_ARRAYS = (".npy", ".npz")
_KNOWN = frozenset((*IMAGES, *_VIDEOS, *_ARRAYS))
_FORMAT = "spdl_torch prepared data"
_VERSION = 1


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings that the bytes of the shards depend on, besides the files."""

    resize: int | None = None
    """Pixels of an image's shorter edge; None = files are copied as they are."""
    quality: int = 90
    """The quality of the JPEGs that resized images become."""
    shard_samples: int = 10_000
    """The most samples in a shard."""
    seed: int = 0
    """The seed of the order of the samples."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file, and the sample that it becomes."""

    path: str
    """Relative to the source folder, with ``/``."""
    num_bytes: int
    mtime_ns: int
    label: int | None
    """The index of its class among the classes; None = the source has no classes."""


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """All samples in their order, and where each shard begins."""

    folder: str
    settings: Settings
    encoder: str
    """The libraries whose versions the bytes depend on; empty if files are copied."""
    classes: list[str]
    files: list[SourceFile]
    ignored: list[str]
    """Files of other kinds."""

    @property
    def num_shards(self) -> int:
        """The number of shards."""
        return -(-len(self.files) // self.settings.shard_samples)

    def shard_of(self, number: int) -> int:
        """Return the shard that has a sample."""
        return number // self.settings.shard_samples

    def numbers_of(self, shard: int) -> range:
        """Return the numbers of a shard's samples."""
        most = self.settings.shard_samples
        return range(shard * most, min((shard + 1) * most, len(self.files)))

    def to_json(self) -> bytes:
        """Return the content of ``dataset.json``, by which a later run recognises its plan."""
        content = {
            "format": _FORMAT,
            "version": _VERSION,
            "num_files": len(self.files),
            "num_shards": self.num_shards,
            "classes": self.classes,
            "settings": asdict(self.settings),
            "encoder": self.encoder,
            "files_digest": _digest_of(self.files),
        }
        return json.dumps(content, indent=1).encode("ascii") + b"\n"


def shard_name(shard: int) -> str:
    """Return the name of a shard's tar."""
    return f"shard-{shard:06d}.tar"


def planned_shards(folder: str) -> list[str]:
    """Return the names of the tars that a folder's plan has; none if there is no plan.

    Raises: ValueError: the plan's file is damaged.
    """
    path = os.path.join(folder, PLAN_FILE)
    try:
        with open(path, "rb") as file:
            return [shard_name(shard) for shard in range(json.load(file)["num_shards"])]
    except FileNotFoundError:
        return []
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: damaged: {type(error).__name__}: {error}.") from error


def make_plan(folder: str | os.PathLike[str], settings: Settings, encoder: str) -> ShardPlan:
    """Find the files of a folder and plan their shards.

    If there are folders in it, each is a class, as for torchvision's ImageFolder: classes are
    numbered in the order of their names, and the files of a class may lie in folders of their own.

    Raises: ValueError: no file, files beside class folders, a class without a file, or files that
        are not images where images are resized; OSError: the folder cannot be read.
    """
    root = os.fspath(folder)
    classes = sorted(entry.name for entry in _entries(root) if _is_folder(entry))
    ignored: list[str] = []
    files = [*_files_of(root, "", None, ignored)]
    if files and classes:
        raise ValueError(
            f"{root}: expected files, or a folder for each class, found both: "
            f"{files[0].path!r} and {classes[0]!r}. Move one of them away."
        )
    for label, name in enumerate(classes):
        below = os.path.join(root, name)
        found = [*_files_of(below, f"{name}/", label, ignored, is_deep=True)]
        if not found:
            raise ValueError(
                f"{root}: the folder of class {name!r} has no image, video or array. Move it away."
            )
        files += found
    if not files:
        known = " ".join(sorted(_KNOWN))
        raise ValueError(f"{root}: found no image, video or array. Known: {known}.")
    others = (file.path for file in files if Path(file.path).suffix.lower() not in IMAGES)
    if settings.resize is not None and (other := next(others, None)) is not None:
        raise ValueError(
            f"{root}: only images can be resized, found {other!r}. Leave --resize out, or prepare "
            "them apart."
        )
    files.sort(key=_order(settings.seed))
    return ShardPlan(root, settings, encoder, classes, files, ignored)


def _entries(folder: str) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        found = [entry for entry in entries if not entry.name.startswith(".")]
    return sorted(found, key=lambda entry: entry.name)


def _files_of(
    folder: str, prefix: str, label: int | None, ignored: list[str], *, is_deep: bool = False
) -> Iterator[SourceFile]:
    for entry in _entries(folder):
        name = prefix + entry.name
        if _is_folder(entry):
            if is_deep:
                yield from _files_of(entry.path, f"{name}/", label, ignored, is_deep=True)
        elif Path(entry.name).suffix.lower() in _KNOWN:
            yield SourceFile(name, *_size_and_time(entry), label)
        else:
            ignored.append(name)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError as error:
        if is_transient(error):
            raise
        return False  # links in a circle


def _size_and_time(entry: os.DirEntry[str]) -> tuple[int, int]:
    """Return bytes and nanoseconds; zeros for what cannot be read, of which encoding says why."""
    try:
        there = entry.stat()
    except OSError as error:
        if is_transient(error):
            raise
        return 0, 0
    return there.st_size, there.st_mtime_ns


def _order(seed: int) -> Callable[[SourceFile], Any]:
    """Return the sort key. Shuffling sorts by hashes, so the order is the same on every machine."""
    front = str(seed).encode() + b"\0"

    def key(file: SourceFile) -> tuple[bytes, str]:
        return hashlib.blake2b(front + os.fsencode(file.path), digest_size=16).digest(), file.path

    return key


def _digest_of(files: Iterable[SourceFile]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        fields = (file.path, file.num_bytes, file.mtime_ns, file.label)
        digest.update(ascii(fields).encode("ascii"))
    return digest.hexdigest()
