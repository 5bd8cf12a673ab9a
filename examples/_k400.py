"""The videos of a Kinetics folder: by its folders, or by the annotation lists.

Two layouts are understood:

- class folders: ``ROOT/train/<class>/<video>.mp4`` and ``ROOT/val/<class>/<video>.mp4``, or one
  set of class folders ``ROOT/<class>/<video>.mp4``, of which every fifth video of a class is kept
  for validation;
- lists: csv files with the columns ``label, youtube_id, time_start, time_end, split``; the videos
  are anywhere below ROOT and are named ``<youtube_id>_<time_start>_<time_end>.mp4`` (six digits
  each), or ``<youtube_id>.mp4`` where the whole video was kept: then the two times, in seconds, are
  the part to use. A file in a folder whose name begins with ``replacement`` is taken in place of
  one of the same name elsewhere.
"""

from __future__ import annotations

import csv
import math
import os
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

Split = Literal["train", "val"]

SUFFIXES = frozenset({".mp4", ".mkv", ".webm", ".avi", ".mov"})
COLUMNS = ("label", "youtube_id", "time_start", "time_end")
ONE_IN_FIVE = 5
_SPLIT_NAMES = {"train": "train", "val": "val", "validate": "val", "validation": "val"}
_NAMES_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Annotation:
    """A line of a list."""

    label: str
    youtube_id: str
    time_start: float
    """Seconds in the video as it is on the site."""
    time_end: float
    split: str | None
    """``train``, ``val`` or another word of the list; None where it has no such column."""

    def names(self) -> tuple[str, str]:
        """Return the possible names of its file, without the suffix: cut to the ten seconds, or
        whole."""
        start, end = int(self.time_start), int(self.time_end)
        return f"{self.youtube_id}_{start:06d}_{end:06d}", self.youtube_id


@dataclass(frozen=True, slots=True)
class Video:
    """A video file and its class."""

    path: str
    label: int
    window: tuple[float, float] | None = None
    """Start and end of its part of the file, in seconds; None = all of it."""


@dataclass(frozen=True, slots=True)
class Listing:
    """The videos of a split."""

    classes: Sequence[str]
    """Their names, sorted; a label is the place in it."""
    videos: list[Video]
    missing: list[str] = field(default_factory=list)
    """Names of the files that are on the list but not in the folder."""
    num_replaced: int = 0

    def __str__(self) -> str:
        text = f"{len(self.videos):,} videos of {len(self.classes):,} classes"
        if self.num_replaced:
            text += f", replacements: {self.num_replaced:,}"
        if self.missing:
            names = ", ".join(self.missing[:_NAMES_SHOWN])
            dots = ", ..." if len(self.missing) > _NAMES_SHOWN else ""
            text += f", missing: {len(self.missing):,} ({names}{dots})"
        return text


def list_videos(root: Path, annotations: Sequence[Path] = ()) -> dict[Split, Listing]:
    """Return the videos for training and for validation.

    Raises: FileNotFoundError: a split has no videos; ValueError: a file is not such a list.
    """
    if not root.is_dir():
        raise FileNotFoundError(f"{root}: no such folder.")
    listings = _by_lists(root, annotations) if annotations else _by_folders(root)
    for split, listing in listings.items():
        if not listing.videos:
            hint = (
                "ROOT/<class>/<video>.mp4, ROOT/train/... and ROOT/val/..., or pass --annotations"
            )
            raise FileNotFoundError(f"{root}: no videos for {split!r}: {listing}. Expected {hint}.")
    return listings


def read_annotations(path: Path) -> list[Annotation]:
    """Return the lines of a list, without empty ones.

    Raises: ValueError: a column is missing, or a time is not a number; the message has the line.
    """
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, skipinitialspace=True)
        columns = [name.strip() for name in reader.fieldnames or ()]
        if missing := [name for name in COLUMNS if name not in columns]:
            raise ValueError(
                f"{path}: no column {', '.join(missing)}; it has {', '.join(columns) or 'none'}."
            )
        reader.fieldnames = columns
        return [_annotation(row, f"{path}:{reader.line_num}") for row in reader]


def _annotation(row: Mapping[str, str | None], where: str) -> Annotation:
    cells = {name: (row.get(name) or "").strip() for name in (*COLUMNS, "split")}
    if not cells["label"] or not cells["youtube_id"]:
        raise ValueError(f"{where}: label and youtube_id must not be empty, got {dict(row)}.")
    try:
        start, end = float(cells["time_start"]), float(cells["time_end"])
    except ValueError:
        start = end = math.nan
    if not 0 <= start < end < math.inf:
        raise ValueError(
            f"{where}: time_start and time_end must be seconds, 0 <= start < end, got "
            f"{cells['time_start']!r} and {cells['time_end']!r}."
        )
    split = cells["split"].lower() or None
    split = _SPLIT_NAMES.get(split, split) if split else None
    return Annotation(cells["label"], cells["youtube_id"], start, end, split)


def _by_lists(root: Path, paths: Sequence[Path]) -> dict[Split, Listing]:
    annotations = [line for path in paths for line in read_annotations(path)]
    classes = sorted({line.label for line in annotations})
    label_of = {name: label for label, name in enumerate(classes)}
    files = _Files(root)
    listings: dict[Split, Listing] = {}
    for split in ("train", "val"):
        videos, missing, num_replaced = [], [], 0
        for line in annotations:
            if line.split not in (split, None):
                continue
            found = files.find(line, split)
            if found is None:
                missing.append(line.names()[0])
                continue
            path, is_whole = found
            num_replaced += _is_replacement(path)
            window = (line.time_start, line.time_end) if is_whole else None
            videos.append(Video(str(root / path), label_of[line.label], window))
        listings[split] = Listing(classes, videos, missing, num_replaced)
    return listings


class _Files:
    """Every video below a folder, by its name without the suffix; paths begin at the folder."""

    def __init__(self, root: Path) -> None:
        self.paths: dict[str, list[Path]] = {}
        for path in _videos_below(root):
            relative = Path(path).relative_to(root)
            self.paths.setdefault(relative.stem, []).append(relative)

    def find(self, line: Annotation, split: str) -> tuple[Path, bool] | None:
        """Return the file of a line, and whether it is the whole video; None = it is not there."""
        for is_whole, name in enumerate(line.names()):
            if candidates := self.paths.get(name):
                # One id may be on several lists: the folders that the file is in decide.
                best = max(candidates, key=lambda path: _fit(path, line.label, split))
                return best, bool(is_whole)
        return None


def _fit(path: Path, label: str, split: str) -> tuple[bool, bool, bool]:
    in_split = split in {_SPLIT_NAMES.get(folder) for folder in path.parent.parts}
    in_class = path.parent.name.replace("_", " ") == label.replace("_", " ")
    return _is_replacement(path), in_split, in_class


def _is_replacement(path: Path) -> bool:
    return any(folder.lower().startswith("replacement") for folder in path.parent.parts)


def _by_folders(root: Path) -> dict[Split, Listing]:
    splits = {
        _SPLIT_NAMES[place.name]: place for place in _folders(root) if place.name in _SPLIT_NAMES
    }
    if not splits:
        return _one_in_five(root)
    classes = sorted({place.name for split in splits.values() for place in _folders(split)})
    listings: dict[Split, Listing] = {}
    for split in ("train", "val"):
        found = _by_class(splits[split], classes) if split in splits else []
        listings[split] = Listing(classes, found)
    return listings


def _one_in_five(root: Path) -> dict[Split, Listing]:
    """Split off for validation the third, eighth, ... video of each class; of two, the second."""
    classes = [place.name for place in _folders(root)]
    listings: dict[Split, Listing] = {split: Listing(classes, []) for split in ("train", "val")}
    for _, group in groupby(_by_class(root, classes), key=lambda video: video.label):
        videos = list(group)
        kept = videos[min(2, len(videos) - 1) :: ONE_IN_FIVE] if len(videos) > 1 else []
        listings["val"].videos.extend(kept)
        listings["train"].videos.extend(video for video in videos if video not in kept)
    return listings


def _by_class(folder: Path, classes: Sequence[str]) -> list[Video]:
    return [
        Video(path, label)
        for label, name in enumerate(classes)
        for path in _videos_below(folder / name)
    ]


def _folders(folder: Path) -> Iterator[Path]:
    return (place for place in sorted(folder.iterdir()) if place.is_dir())


def _videos_below(folder: Path) -> list[str]:
    walk: Iterable[tuple[str, list[str], list[str]]] = os.walk(folder, followlinks=True)
    paths = [os.path.join(place, name) for place, _, names in walk for name in names]
    return sorted(path for path in paths if os.path.splitext(path)[1].lower() in SUFFIXES)


def write_videos(folder: Path, *, num_classes: int, per_class: int, num_frames: int = 24) -> None:
    """Write ``folder/class_<n>/<index>.mp4``: moving bars in 64 x 48 pixels, each class with its
    own motion, at 12 frames a second.
    """
    for label in range(num_classes):
        place = folder / f"class_{label}"
        place.mkdir(parents=True, exist_ok=True)
        for index in range(per_class):
            _write_video(place / f"{index:03d}.mp4", label, 7 * index, num_frames)


def _write_video(path: Path, label: int, begin: int, num_frames: int) -> None:
    import av
    import numpy as np

    codec = "libx264" if "libx264" in av.codecs_available else "mpeg4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=12)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for number in range(num_frames):
            picture = np.full((48, 64, 3), 40, np.uint8)
            at = (begin + 3 * number) % 40
            if label % 2:
                picture[at : at + 8] = (230, 60 * (label % 4), 40)
            else:
                picture[:, at : at + 8] = (40, 60 * (label % 4), 230)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode(None))
