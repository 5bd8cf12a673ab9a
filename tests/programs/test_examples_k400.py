"""examples/k400_video_classification.py: the right videos, the right frames, any loader."""

import importlib.util
import logging
import re
from pathlib import Path

import _k400
import pytest
from support.later import LIGHTNINGS_WARNINGS

from spdl_torch.errors import PipelineFailure

av = pytest.importorskip("av")
if importlib.util.find_spec("lightning") is None:  # which is imported no earlier than it is used
    pytest.skip("could not import 'lightning'", allow_module_level=True)

HEADER = "label,youtube_id,time_start,time_end,split\n"

pytestmark = LIGHTNINGS_WARNINGS


@pytest.fixture(scope="module")
def program():
    """The program as a module."""
    level = logging.getLogger("lightning.pytorch").level
    yield importlib.import_module("k400_video_classification")
    logging.getLogger("lightning.pytorch").setLevel(level)


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
    """Four videos."""
    folder = tmp_path_factory.mktemp("videos")
    _k400.write_videos(folder, num_classes=2, per_class=2)
    return sorted(folder.rglob("*.mp4"))


@pytest.fixture
def root(videos, tmp_path):
    """Class folders of both splits; every video is in both."""
    for split in ("train", "val"):
        for number, path in enumerate(videos):
            place = tmp_path / "k400" / split / ("arm wrestling", "yoga")[number // 2]
            place.mkdir(parents=True, exist_ok=True)
            (place / path.name).symlink_to(path)
    return tmp_path / "k400"


def touch(root, *paths):
    """Empty files."""
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).touch()


def test_list_finds_files_when_they_are_named_in_any_known_way(tmp_path):
    """Cut or whole, flat or in class folders, replaced or missing."""
    files = {
        "train/arm wrestling/cut_000003_000013.mp4": (0, None),
        "replacement/broken_000000_000010.mp4": (1, None),
        "whole.mkv": (1, (7.0, 17.0)),
        "train/yoga/both_000001_000011.mp4": (1, None),
    }
    touch(tmp_path, *files, "train/broken_000000_000010.mp4", "val/yoga/both_000001_000011.mp4")
    touch(tmp_path, "val/yoga/both_000001_000011.txt")
    train, val = tmp_path / "train.csv", tmp_path / "val.csv"
    train.write_text(
        HEADER
        + "arm wrestling,cut,3,13,train\nyoga,broken,0,10,train\nyoga,whole,7,17,train\n"
        + "yoga,both,1,11,train\nyoga,gone,0,10,train\n"
    )
    val.write_text(HEADER + "yoga,both,1,11,validate\nzumba,absent,0,10,validate\n")
    listings = _k400.list_videos(tmp_path, [train, val])
    assert files == {
        Path(video.path).relative_to(tmp_path).as_posix(): (video.label, video.window)
        for video in listings["train"].videos
    }
    assert str(listings["train"]) == ("4 videos of 3 classes, missing: 1 (gone_000000_000010)")
    assert [Path(video.path).parent.parent.name for video in listings["val"].videos] == ["val"]
    assert listings["val"].classes == ["arm wrestling", "yoga", "zumba"]
    assert listings["val"].missing == ["absent_000000_000010"]


def test_folders_are_classes_when_there_is_no_list(tmp_path):
    """A class has one label in both splits, also where one of them lacks it."""
    touch(tmp_path, "train/a/1.mp4", "train/c/2.MP4", "train/c/notes.txt", "validation/b/3.avi")
    listings = _k400.list_videos(tmp_path)
    assert listings["train"].classes == listings["val"].classes == ["a", "b", "c"]
    assert [video.label for video in listings["train"].videos] == [0, 2]
    assert [video.label for video in listings["val"].videos] == [1]


def test_clips_are_the_same_when_another_loader_is_used(
    program, root, tmp_path, capsys, monkeypatch
):
    """Train, validate, and validate the checkpoint again with each loader: clips are equal to the
    byte, and figures to the digit."""
    common, logs = ["--smoke", "--data", str(root)], tmp_path / "logs"
    step, seen = program.Classifier.validation_step, []

    def noting(self, batch, batch_idx):
        seen.append((batch["labels"].tolist(), batch["clips"].numpy().tobytes()))
        step(self, batch, batch_idx)

    monkeypatch.setattr(program.Classifier, "validation_step", noting)
    program.main([*common, "--log-dir", str(logs)])
    printed = capsys.readouterr().out
    for number in range(2):
        for split in ("training", "validation"):
            line = rf"^epoch {number} {split}: 4 videos, loss \d.*top-1 .*top-5 .*, 0 skipped$"
            assert re.search(line, printed, re.M), printed
    (metrics,) = logs.rglob("metrics.csv")
    names = metrics.read_text().splitlines()[0].split(",")
    assert {"train/loss", "train/top1", "val/top1", "val/top5"} <= {*names}
    trained = seen[-2:]
    assert sum(len(labels) for labels, _ in trained) == 4
    figures = re.findall("validation: (.*top-5 [^,]*)", printed)[-1]
    checkpoint = ["--evaluate", "--checkpoint", str(logs / "checkpoints" / "last.ckpt")]
    for loader, num_workers in (("threads", "2"), ("pipeline", "2"), ("threads", "0")):
        seen.clear()
        program.main([*common, *checkpoint, "--loader", loader, "--num-workers", num_workers])
        assert seen == trained, loader
        assert f"validation: {figures}" in capsys.readouterr().out


def test_bad_video_is_counted_when_it_is_to_be_skipped(program, root, capsys, caplog):
    """Otherwise it ends the run; both name it."""
    for split in ("train", "val"):
        (root / split / "yoga" / "bad.mp4").write_bytes(b"this is no video")
    common = ["--smoke", "--data", str(root), "--loader", "pipeline"]
    with pytest.raises(PipelineFailure, match=r"stage 'load': 1 of . tasks failed") as caught:
        program.main(common)
    assert all("bad.mp4" in str(error) for error in caught.value.exceptions)
    caplog.clear()
    program.main([*common, "--on-error", "skip"])
    printed = capsys.readouterr().out
    assert re.search("^epoch 1 validation: 4 videos, .*, 1 skipped$", printed, re.M), printed
    left_out = "^epoch 1 training: .*, 1 left out, which would not fill a batch, . skipped$"
    assert re.search(left_out, printed, re.M), printed
    assert any("bad.mp4" in message for message in caplog.messages)
