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
import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import av
import numpy as np

SUFFIXES = frozenset({".mp4", ".mkv", ".webm", ".avi", ".mov"})
COLUMNS = ("label", "youtube_id", "time_start", "time_end")
_SPLIT_NAMES = {"train": "train", "val": "val", "validate": "val", "validation": "val"}
_NAMES_SHOWN = 5


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
    videos: list[Video] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    """Names of the files that are on the list but not in the folder."""

    def __str__(self) -> str:
        text = f"{len(self.videos):,} videos of {len(self.classes):,} classes"
        if self.missing:
            names = ", ".join(self.missing[:_NAMES_SHOWN])
            dots = ", ..." if len(self.missing) > _NAMES_SHOWN else ""
            text += f", missing: {len(self.missing):,} ({names}{dots})"
        return text


def list_videos(root: Path, annotations: Sequence[Path] = ()) -> dict[str, Listing]:
    """Return the videos for training and for validation, as ``train`` and ``val``.

    Raises: FileNotFoundError: a split has no videos; ValueError: a file is not such a list.
    """
    listings = _by_lists(root, annotations) if annotations else _by_folders(root)
    for split, listing in listings.items():
        if not listing.videos:
            hint = (
                "ROOT/<class>/<video>.mp4, ROOT/train/... and ROOT/val/..., or pass --annotations"
            )
            raise FileNotFoundError(f"{root}: no videos for {split!r}: {listing}. Expected {hint}.")
    return listings


def read_annotations(path: Path) -> list[dict[str, str]]:
    """Return the lines of a list. Raises: ValueError: a column is missing."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, skipinitialspace=True)
        columns = [name.strip() for name in reader.fieldnames or ()]
        if missing := [name for name in COLUMNS if name not in columns]:
            raise ValueError(
                f"{path}: no column {', '.join(missing)}; it has {', '.join(columns) or 'none'}."
            )
        reader.fieldnames = columns
        return [{name: (cell or "").strip() for name, cell in row.items()} for row in reader]


def _by_lists(root: Path, paths: Sequence[Path]) -> dict[str, Listing]:
    lines = [line for path in paths for line in read_annotations(path)]
    classes = sorted({line["label"] for line in lines})
    listings = {split: Listing(classes) for split in ("train", "val")}
    files: dict[str, list[Path]] = {}
    for path in _videos_below(root):
        files.setdefault(path.stem, []).append(path.relative_to(root))
    for line in lines:
        window = float(line["time_start"]), float(line["time_end"])
        cut = f"{line['youtube_id']}_{int(window[0]):06d}_{int(window[1]):06d}"
        own = line.get("split", "").lower()
        for split in [_SPLIT_NAMES.get(own)] if own else listings:
            if split is None:
                continue  # a split that is neither
            found = files.get(cut) or files.get(line["youtube_id"])
            if found is None:
                listings[split].missing.append(cut)
                continue
            # One id may be on several lists: the folders that the file is in decide.
            best = max(found, key=lambda path: _fit(path, line["label"], split))
            label = classes.index(line["label"])
            part = None if cut in files else window
            listings[split].videos.append(Video(str(root / best), label, part))
    return listings


def _fit(path: Path, label: str, split: str) -> tuple[bool, bool, bool]:
    folders = path.parent.parts
    is_replacement = any(folder.lower().startswith("replacement") for folder in folders)
    in_split = split in {_SPLIT_NAMES.get(folder) for folder in folders}
    in_class = path.parent.name.replace("_", " ") == label.replace("_", " ")
    return is_replacement, in_split, in_class


def _by_folders(root: Path) -> dict[str, Listing]:
    found = [place for place in _folders(root) if place.name in _SPLIT_NAMES]
    places = {_SPLIT_NAMES[place.name]: place for place in found}
    classes = sorted({each.name for place in places.values() or [root] for each in _folders(place)})
    listings = {split: Listing(classes) for split in ("train", "val")}
    for label, name in enumerate(classes):
        if not places:  # the third, eighth, ... video is for validation; of two, the second
            videos = [Video(str(path), label) for path in _videos_below(root / name)]
            kept = videos[min(2, len(videos) - 1) :: 5] if len(videos) > 1 else []
            listings["val"].videos.extend(kept)
            listings["train"].videos.extend(video for video in videos if video not in kept)
        for split, place in places.items():
            paths = _videos_below(place / name)
            listings[split].videos.extend(Video(str(path), label) for path in paths)
    return listings


def _folders(folder: Path) -> list[Path]:
    return sorted(place for place in folder.iterdir() if place.is_dir())


def _videos_below(folder: Path) -> list[Path]:
    walk = os.walk(folder, followlinks=True)
    paths = [Path(place, name) for place, _, names in walk for name in names]
    return sorted(path for path in paths if path.suffix.lower() in SUFFIXES)


def write_videos(folder: Path, *, num_classes: int, per_class: int, num_frames: int = 24) -> None:
    """Write ``folder/class_<n>/<index>.mp4``: moving bars in 64 x 48 pixels, each class with its
    own motion, at 12 frames a second.
    """
    for label, index in itertools.product(range(num_classes), range(per_class)):
        path = folder / f"class_{label}" / f"{index:03d}.mp4"
        path.parent.mkdir(parents=True, exist_ok=True)
        with av.open(str(path), "w") as container:
            stream = container.add_stream("libx264", rate=12)
            stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
            for number in range(num_frames):
                picture = np.full((48, 64, 3), 40, np.uint8)
                at = (7 * index + 3 * number) % 40
                if label % 2:
                    picture[at : at + 8] = (230, 60 * (label % 4), 40)
                else:
                    picture[:, at : at + 8] = (40, 60 * (label % 4), 230)
                container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
            container.mux(stream.encode(None))
