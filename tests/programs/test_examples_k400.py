"""examples/k400_video_classification.py: the right videos, the right frames, any loader."""

import csv
import importlib.util
import logging
import re
from pathlib import Path

import pytest
import torch
from _folders import ROOT
from hypothesis import given, strategies as st

from spdl_torch.errors import DecodeError, PipelineFailure

av = pytest.importorskip("av")
if importlib.util.find_spec("lightning") is None:  # which is imported no earlier than it is used
    pytest.skip("could not import 'lightning'", allow_module_level=True)

REAL_VIDEOS = ROOT.parent / "shared" / "data" / "videos"
REAL_NAMES = ("k400_arm_wrestling.mp4", "structuralize.mp4", "test_a.mp4", "test_b.avi")
HEADER = "label,youtube_id,time_start,time_end,split\n"

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec"),
    pytest.mark.filterwarnings("ignore:The `srun` command is available"),
]


@pytest.fixture(scope="module", autouse=True)
def examples_can_be_imported():
    """As if the program had been started."""
    level = logging.getLogger("lightning.pytorch").level
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "examples"))
        yield
    logging.getLogger("lightning.pytorch").setLevel(level)


@pytest.fixture(scope="module")
def k400(examples_can_be_imported):
    """Which videos there are."""
    return importlib.import_module("_k400")


@pytest.fixture(scope="module")
def program(examples_can_be_imported):
    """The program as a module."""
    return importlib.import_module("k400_video_classification")


@pytest.fixture(scope="module")
def clips(examples_can_be_imported):
    """What is cut out of them."""
    return importlib.import_module("_k400_clips")


@pytest.fixture(scope="module")
def videos(k400, tmp_path_factory):
    """Four videos: real ones where they are at hand."""
    paths = [REAL_VIDEOS / name for name in REAL_NAMES]
    if all(path.exists() for path in paths):
        return paths
    folder = tmp_path_factory.mktemp("videos")
    k400.write_videos(folder, num_classes=2, per_class=2)
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


def predictions(path):
    """By path: what the csv says."""
    with open(path, encoding="utf-8", newline="") as file:
        return {row["path"]: row for row in csv.DictReader(file)}


def test_list_finds_files_when_they_are_named_in_any_known_way(k400, tmp_path):
    """Cut or whole, flat or in class folders, replaced or missing."""
    touch(
        tmp_path,
        "train/arm wrestling/cut_000003_000013.mp4",
        "train/broken_000000_000010.mp4",
        "replacement/broken_000000_000010.mp4",
        "whole.mkv",
        "train/yoga/both_000001_000011.mp4",
        "val/yoga/both_000001_000011.mp4",
        "val/yoga/both_000001_000011.txt",
    )
    train = tmp_path / "train.csv"
    train.write_text(
        HEADER
        + "arm wrestling,cut,3,13,train\nyoga,broken,0,10,train\nyoga,whole,7,17,train\n"
        + "yoga,both,1,11,train\nyoga,gone,0,10,train\n"
    )
    val = tmp_path / "val.csv"
    val.write_text(HEADER + "yoga,both,1,11,validate\nzumba,absent,0,10,validate\n")
    listings = k400.list_videos(tmp_path, [train, val])
    found = [
        (Path(video.path).relative_to(tmp_path).as_posix(), video.label, video.window)
        for video in listings["train"].videos
    ]
    assert found == [
        ("train/arm wrestling/cut_000003_000013.mp4", 0, None),
        ("replacement/broken_000000_000010.mp4", 1, None),
        ("whole.mkv", 1, (7.0, 17.0)),
        ("train/yoga/both_000001_000011.mp4", 1, None),
    ]
    assert listings["train"].missing == ["gone_000000_000010"]
    assert str(listings["train"]) == (
        "4 videos of 3 classes, replacements: 1, missing: 1 (gone_000000_000010)"
    )
    assert [Path(video.path).parent.parent.name for video in listings["val"].videos] == ["val"]
    assert listings["val"].classes == ["arm wrestling", "yoga", "zumba"]
    assert listings["val"].missing == ["absent_000000_000010"]


def test_folders_are_classes_when_there_is_no_list(k400, tmp_path):
    """A class has one label in both splits, also where one of them lacks it."""
    touch(tmp_path, "train/a/1.mp4", "train/c/2.MP4", "train/c/notes.txt", "validation/b/3.avi")
    listings = k400.list_videos(tmp_path)
    assert listings["train"].classes == listings["val"].classes == ["a", "b", "c"]
    assert [video.label for video in listings["train"].videos] == [0, 2]
    assert [video.label for video in listings["val"].videos] == [1]


@given(
    num_frames=st.integers(1, 40),
    num_clips=st.integers(1, 5),
    clip_frames=st.integers(1, 12),
    stride=st.one_of(st.none(), st.integers(1, 6)),
    seconds=st.floats(0.05, 4),
    first=st.floats(0, 100),
    seed=st.one_of(st.none(), st.integers(0, 2**32)),
)
def test_clip_is_inside_the_video_for_any_length(
    clips, num_frames, num_clips, clip_frames, stride, seconds, first, seed
):
    """Frames ascend and exist; a stride is kept to the last frame; even clips reach both ends."""
    stamps = [first + number / 25 for number in range(num_frames)]
    shape = clips.ClipShape(
        num_frames=clip_frames, stride=stride, seconds=seconds, resize=(8, 8), crop=8
    )
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    indices = clips.clip_indices(stamps, shape, num_clips, generator)
    assert [len(clip) for clip in indices] == [clip_frames] * num_clips
    last = num_frames - 1
    for clip in indices:
        assert clip == sorted(clip)
        assert 0 <= clip[0] <= clip[-1] <= last
        if stride is not None:
            assert clip == [min(clip[0] + k * stride, last) for k in range(clip_frames)]
        if stride is not None and num_frames > (clip_frames - 1) * stride:
            assert clip[-1] - clip[0] == (clip_frames - 1) * stride
    if seed is None and num_clips > 1:
        assert indices[0][0] == 0
        spans_video = (clip_frames - 1) * (stride or 25 * seconds / clip_frames) <= last
        assert indices[-1][-1] == last or not spans_video


def test_predictions_are_the_same_when_another_loader_is_used(program, root, tmp_path, capsys):
    """Train, validate, and validate the checkpoint again with each loader: equal to the digit."""
    common = ["--smoke", "--data", str(root)]
    trained = tmp_path / "trained.csv"
    logs = tmp_path / "logs"
    program.main([*common, "--log-dir", str(logs), "--predictions", str(trained)])
    printed = capsys.readouterr().out
    for number in range(2):
        for split in ("training", "validation"):
            line = rf"^epoch {number} {split}: 4 videos, loss \d.*top-1 .*top-5 .*, 0 skipped$"
            assert re.search(line, printed, re.M), printed
    (metrics,) = logs.rglob("metrics.csv")
    assert {"train/loss", "train/top1", "val/top1", "val/top5"} <= set(
        metrics.read_text().splitlines()[0].split(",")
    )
    assert len(predictions(trained)) == 4
    for loader, num_workers in (("threads", 2), ("pipeline", 2), ("torch", 0)):
        again = tmp_path / f"{loader}.csv"
        checkpoint = ["--checkpoint", str(logs / "checkpoints" / "last.ckpt")]
        options = ["--loader", loader, "--num-workers", str(num_workers), *checkpoint]
        program.main([*common, "--evaluate", *options, "--predictions", str(again)])
        assert predictions(again) == predictions(trained), loader


@pytest.mark.parametrize("loader", ["threads", "pipeline"])
def test_bad_video_is_counted_when_it_is_to_be_skipped(program, root, loader, capsys, caplog):
    """Otherwise it ends the run; both name it."""
    for split in ("train", "val"):
        (root / split / "yoga" / "bad.mp4").write_bytes(b"this is no video")
    common = ["--smoke", "--data", str(root), "--loader", loader]
    message = r"bad\.mp4|stage 'demux': 1 of . tasks failed"
    with pytest.raises((DecodeError, PipelineFailure), match=message) as caught:
        program.main(common)
    errors = getattr(caught.value, "exceptions", [caught.value])
    assert all("bad.mp4" in str(error) for error in errors)
    caplog.clear()
    program.main([*common, "--on-error", "skip"])
    printed = capsys.readouterr().out
    assert re.search("^epoch 1 validation: 4 videos, .*, 1 skipped$", printed, re.M), printed
    left_out = "^epoch 1 training: .*, 1 left out, which would not fill a batch, . skipped$"
    assert re.search(left_out, printed, re.M), printed
    assert any("bad.mp4" in message for message in caplog.messages)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--data ROOT is needed"),
        (["--data", "x", "--clips", "0"], "must be >= 1, got 0"),
        (["--data", "x", "--model", "resnet50"], "invalid choice"),
    ],
)
def test_options_are_refused_when_they_make_no_run(program, arguments, message, capsys):
    """As argparse does, with exit code 2."""
    with pytest.raises(SystemExit, match="2"):
        program.parse(arguments)
    assert message in capsys.readouterr().err
