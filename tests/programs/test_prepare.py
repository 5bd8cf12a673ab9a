"""Prepared shards hold every file once, whatever stops the run, and damage is named."""

import contextlib
import errno
import gc
import gzip
import io
import json
import os
import re
import resource
import signal
import tarfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torchvision.datasets
from hypothesis import given, settings, strategies as st
from PIL import Image
from support.forks import fork, found_in_fork

from spdl_torch.__main__ import main
from spdl_torch.data.sources._index import index_path, scan_tar


def picture(number, size=(24, 16)):
    """Smooth, so that JPEGs of it are close to it."""
    rows, columns = np.mgrid[: size[1], : size[0]]
    pixels = np.stack([rows * 5, columns * 5, rows + columns + 20 * number], axis=-1)
    return Image.fromarray((pixels % 256).astype(np.uint8))


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Eleven images in three classes, of several formats; one lies deeper, one name has dots."""
    root = tmp_path_factory.mktemp("images")
    names = ["a/0.png", "a/1.jpg", "a/1.png", "a/x.y.JPEG", "b/deep/er/3.jpg", "b/4.bmp"]
    names += [f"c c/{number}.jpg" for number in range(5)]
    for number, name in enumerate(names):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        picture(number).save(path)
    (root / "a" / "notes.txt").write_text("no image")
    (root / "a" / ".hidden.jpg").write_text("no image")
    return root


def prepare(*arguments):
    """The status of the command, and what it printed on both streams."""
    out, log = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(log):
        status = main(["prepare", *map(str, arguments)])
    return status, out.getvalue(), log.getvalue()


SMALL = "--shard-samples", 4


def prepared(source, out, *options):
    """The folder, once the command has written it; by default with shards of four samples."""
    status, _, log = prepare(source, out, *(options or SMALL))
    assert status == 0, log
    return out


def contents(folder):
    """Every file of a folder by its name."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def samples_of(folder):
    """The samples of the shards as the standard library sees them."""
    samples = {}
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                key, _, field = member.name.partition(".")
                samples.setdefault(key, {})[field] = tar.extractfile(member).read()
    return samples


def test_shards_hold_every_file_once(images, tmp_path):
    """With torchvision's label, its class and its name; tarfile reads them."""
    out = prepared(images, tmp_path / "out")
    expected = {
        os.path.relpath(path, images): label
        for path, label in torchvision.datasets.ImageFolder(images).samples
        if ".hidden" not in path
    }
    found = {}
    for sample in samples_of(out).values():
        facts = json.loads(sample["json"])
        (content,) = (value for key, value in sample.items() if key not in ("json", "cls"))
        assert content == (images / facts["file"]).read_bytes()
        assert facts["class"] == facts["file"].split("/")[0]
        found[facts["file"]] = int(sample["cls"])
    assert found == expected
    assert list(found) != sorted(found)
    assert len(list(out.glob("*.tar"))) == 3


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # open files
def test_webdataset_reads_the_shards(images, tmp_path):
    """The same samples in the same order."""
    webdataset = pytest.importorskip("webdataset")
    out = prepared(images, tmp_path / "out")
    urls = [str(path) for path in sorted(out.glob("*.tar"))]
    read = webdataset.WebDataset(urls, shardshuffle=False)
    found = {
        sample["__key__"]: {k: v for k, v in sample.items() if not k.startswith("__")}
        for sample in read
    }
    assert found == samples_of(out)
    del read
    gc.collect()


def test_images_are_resized_as_pillow_does(tmp_path):
    """The shorter edge has the size, smaller images keep theirs, JPEGs then their bytes, and the
    orientation is that of the original."""
    source = tmp_path / "source"
    source.mkdir()
    exif = Image.Exif()
    exif[0x0112] = 6
    picture(0, (64, 40)).save(source / "large.png", exif=exif)
    others = {"tall.jpg": (30, 45), "small.jpg": (10, 90), "small.png": (10, 12)}
    for number, (name, size) in enumerate(others.items(), 1):
        picture(number, size).save(source / name)
    out = prepared(source, tmp_path / "out", "--resize", 20, "--quality", 97)
    assert json.loads((out / "dataset.json").read_bytes())["settings"]["quality"] == 97
    found = {json.loads(s["json"])["file"]: s["jpg"] for s in samples_of(out).values()}
    images = {name: Image.open(io.BytesIO(content)) for name, content in found.items()}
    sizes = others | {"large.png": (32, 20), "tall.jpg": (20, 30)}
    assert {name: image.size for name, image in images.items()} == sizes
    assert found["small.jpg"] == (source / "small.jpg").read_bytes()
    assert {image.format for image in images.values()} == {"JPEG"}
    assert images["large.png"].getexif()[0x0112] == 6
    for name in ("large.png", "tall.jpg"):
        size = images[name].size
        expected = Image.open(source / name).convert("RGB").resize(size, Image.Resampling.BICUBIC)
        difference = np.asarray(expected).astype(int) - np.asarray(images[name])
        assert np.abs(difference).mean() < 4


def test_bytes_are_the_same_for_any_number_of_workers(images, tmp_path):
    """Tars, indexes and the plan."""
    options = ["--resize", 12, *SMALL, "--workers"]
    one, many = (contents(prepared(images, tmp_path / str(n), *options, n)) for n in (1, 7))
    assert one == many


def end_at(event_number, signum, source, out):
    """Run the command, and end this process when it adds, syncs or renames for that time: the
    status, and how many times there were."""
    count = 0

    def counted(function):
        def call(*arguments, **options):
            nonlocal count
            count += 1
            if count == event_number:
                os.kill(os.getpid(), signum)
            return function(*arguments, **options)

        return call

    addfile = tarfile.TarFile.addfile
    counted_addfile = counted(addfile)

    def add(tar, member, content):
        # Once a sample, in the middle of it.
        (counted_addfile if member.name.endswith(".cls") else addfile)(tar, member, content)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    tarfile.TarFile.addfile = add
    os.fsync, os.replace = counted(os.fsync), counted(os.replace)
    status, _, _ = prepare(source, out, "--shard-samples", 6)
    return status, count


def test_run_that_was_ended_is_finished_by_the_next(images, tmp_path):
    """After each file, before and after each rename: what is there is whole, and at the end every
    byte is that of a run that nobody stopped. Ctrl-C leaves nothing but whole shards."""
    whole, out = tmp_path / "whole", tmp_path / "interrupted"
    _, num_events = found_in_fork(lambda: end_at(0, signal.SIGKILL, images, whole))
    expected = contents(whole)
    assert num_events == 11 + 2 * 5  # files, then syncs and renames
    # In the second shard.
    assert found_in_fork(lambda: end_at(14, signal.SIGINT, images, out))[0] == 130
    assert set(contents(out)) == {"dataset.json", "shard-000000.tar", "shard-000000.index.json"}
    before = (out / "shard-000000.tar").stat().st_ino
    assert contents(prepared(images, out, "--shard-samples", 6)) == expected
    assert (out / "shard-000000.tar").stat().st_ino == before
    for number in range(1, num_events + 1):
        out = tmp_path / str(number)
        killed = fork(partial(end_at, number, signal.SIGKILL, images, out))
        assert os.waitpid(killed, 0)[1] == signal.SIGKILL
        for name, content in contents(out).items():
            assert name.endswith(".partial") or content == expected[name]
        assert contents(prepared(images, out, "--shard-samples", 6)) == expected


def test_full_disk_leaves_whole_files(images, tmp_path):
    """The error is the system's, nothing half-written stays, and there is nothing to repair."""

    def fill_disk():
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))  # with a real error of the system
        return prepare(images, tmp_path / "out", *SMALL)

    status, _, log = found_in_fork(fill_disk)
    assert status == 1
    assert "File too large" in log
    assert set(contents(tmp_path / "out")) == {"dataset.json"}
    whole = prepared(images, tmp_path / "whole")
    assert contents(prepared(images, tmp_path / "out")) == contents(whole)


@pytest.mark.parametrize(
    ("place", "make", "reason"),
    [
        ("a/damaged.jpg", lambda path: path.write_bytes(b"no image"), ".* cannot identify"),
        ("a/empty.jpg", lambda path: path.touch(), ""),
        ("gone.jpg", lambda path: path.symlink_to("nowhere/1.jpg"), rf"\[Errno {errno.ENOENT}]"),
        ("a/round.jpg", lambda path: path.symlink_to("round.jpg"), rf"\[Errno {errno.ELOOP}]"),
    ],
)
def test_file_that_cannot_be_used_is_named_and_left_out_on_request(place, make, reason, tmp_path):
    """In a class, and without classes. The run ends at it; the same command with ``--on-error
    skip`` goes on, and the index says which file is missing and why."""
    source = tmp_path / "source"
    path = source / place
    path.parent.mkdir(parents=True)
    for number in range(5):
        picture(number).save(path.parent / f"{number}.jpg")
    make(path)
    options = ["--resize", 12, "--shard-samples", 2]
    status, _, log = prepare(source, tmp_path / "out", *options)
    assert status == 1
    assert place in log
    assert "--on-error skip" in log
    options += ["--on-error", "skip"]
    for _ in range(2):
        assert "1 file left out" in prepare(source, tmp_path / "out", *options)[1]
    indexes = [json.loads(p.read_bytes()) for p in sorted((tmp_path / "out").glob("*.index.json"))]
    ((left_out, why),) = (pair for index in indexes for pair in index["left_out"])
    assert left_out == place
    assert re.match(reason, why)
    assert sum(index["num_samples"] for index in indexes) == 5
    assert contents(prepared(source, tmp_path / "once", *options)) == contents(tmp_path / "out")


def test_store_that_fails_is_not_left_out(images, tmp_path, monkeypatch):
    """``--on-error skip`` leaves out files, not what an outage hides: the run ends, and goes on."""

    def failing(path, mode):
        if path.endswith("3.jpg"):
            raise OSError(errno.EIO, "the server is away", path)
        return open(path, mode)

    options = [*SMALL, "--on-error", "skip"]
    with monkeypatch.context() as patch:
        patch.setattr("spdl_torch.prepare.samples.open", failing, raising=False)
        status, _, log = prepare(images, tmp_path / "out", *options)
    assert status == 1
    assert "the server is away" in log
    whole = prepared(images, tmp_path / "whole")
    assert contents(prepared(images, tmp_path / "out", *options)) == contents(whole)


def put(root, *names):
    """Files with a byte in them."""
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")


def test_videos_and_arrays_are_copied_and_need_no_classes(tmp_path):
    """The field is the ending; there is no label."""
    put(tmp_path, "source/one.npy", "source/two.npz", "source/three.MP4")
    samples = samples_of(prepared(tmp_path / "source", tmp_path / "out"))
    fields = {json.loads(sample["json"])["file"]: set(sample) for sample in samples.values()}
    assert fields == {
        "one.npy": {"npy", "json"},
        "two.npz": {"npz", "json"},
        "three.MP4": {"mp4", "json"},
    }


@pytest.mark.parametrize(
    ("files", "arguments", "message"),
    [
        ([], ["source", "out"], "source: found no image, video or array"),
        (["1.jpg", "a/1.jpg"], ["source", "out"], "found both: '1.jpg' and 'a'"),
        (["a/1.jpg", "b/1.txt"], ["source", "out"], "the folder of class 'b' has no image"),
        (["1.mp4"], ["source", "out", "--resize", "9"], "can be resized, found '1.mp4'"),
        (["1.jpg"], ["source", "source/out"], "is inside "),
        (["1.jpg"], ["source", "other"], "holds other files, such as 'y'"),
        (["1.jpg"], ["source"], "OUT is missing"),
        (["1.jpg"], ["source/1.jpg", "--verify"], "expected a folder of tars"),
    ],
)
def test_folder_that_cannot_be_used_is_refused(tmp_path, monkeypatch, files, arguments, message):
    """Status 2, with what is wrong and what to do; nothing is written."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "source").mkdir()
    put(tmp_path, "other/y", *(f"source/{name}" for name in files))
    status, _, log = prepare(*arguments)
    assert status == 2
    assert message in log
    assert not (tmp_path / "out").exists()


def test_folder_of_another_plan_is_refused(images, tmp_path):
    """Another option, or another file: never two kinds of shards in one folder."""
    source = tmp_path / "source"
    put(source, "1.npy", "2.npy")
    out = prepared(source, tmp_path / "out")
    before = contents(out)
    assert "was begun with other files" in prepare(source, out, "--quality", 91)[2]
    (source / "1.npy").rename(source / "3.npy")
    status, _, log = prepare(source, out)
    assert (status, contents(out)) == (2, before)
    assert "was begun with other files" in log


@pytest.fixture(scope="module")
def whole(images, tmp_path_factory):
    """Shards that stay as they are, and the bytes of the second that say something."""
    out = prepared(images, tmp_path_factory.mktemp("whole") / "out")
    path = out / "shard-000001.tar"
    files = scan_tar(str(path)).files
    parts = zip(files["offset"], files["size"], strict=True)
    return out, path, [place for start, n in parts for place in range(start - 512, start + n)]


@settings(max_examples=15)
@given(data=st.data())
def test_damaged_shard_is_named(whole, data):
    """Any bit of a header or a content, and any cut."""
    out, path, places = whole
    content = path.read_bytes()
    if data.draw(st.booleans()):
        damaged = bytearray(content)
        damaged[data.draw(st.sampled_from(places))] ^= data.draw(st.integers(1, 255))
    else:
        damaged = content[: data.draw(st.integers(0, len(content) - 1))]
    path.write_bytes(damaged)
    try:
        status, printed, _ = prepare("--verify", out)
    finally:
        path.write_bytes(content)
    assert status == 1
    (line,) = (line for line in printed.splitlines() if line.startswith("DAMAGED"))
    assert str(path) in line
    assert "3 shards" in printed
    assert "1 damaged" in printed


def test_index_that_is_missing_or_damaged_is_named(images, tmp_path):
    """And a run after it writes the shard anew."""
    out = prepared(images, tmp_path / "out")
    expected = contents(out)
    index = Path(index_path(str(out / "shard-000001.tar")))
    index.write_bytes(index.read_bytes().replace(b'"offset": [0,', b'"offset": [1,'))
    assert "the samples are not where" in prepare("--verify", out)[1]
    index.write_bytes(b"{}")
    assert "not an index of a tar, or damaged" in prepare("--verify", out)[1]
    index.unlink()
    (out / "shard-000002.tar").unlink()
    status, printed, _ = prepare("--verify", out)
    assert status == 1
    assert f"{index} is missing" in printed
    assert f"DAMAGED {out / 'shard-000002.tar'}: " in printed
    assert contents(prepared(images, out, *SMALL, "--verify")) == expected


def test_index_is_written_for_tars_of_others(images, tmp_path):
    """It is the one that the shard was written with. A tar that cannot be indexed is named, and the
    others are: one that is cut, and one that is compressed."""
    out = prepared(images, tmp_path / "out")
    expected = contents(out)

    def index_anew():
        for path in out.glob("*.index.json"):
            path.unlink()
        return prepare("--index", out)

    status, printed, _ = index_anew()
    assert (status, contents(out)) == (0, expected)
    assert "3 shards, 11 samples: indexed" in printed
    cut, whole, compressed = sorted(out.glob("*.tar"))
    cut.write_bytes(cut.read_bytes()[:700])
    compressed.write_bytes(gzip.compress(compressed.read_bytes()))
    status, printed, _ = index_anew()
    assert status == 1
    bad, zipped, last = printed.splitlines()
    assert bad.startswith(f"DAMAGED {cut}: ")
    assert zipped.startswith(f"DAMAGED {compressed}: ")
    assert "the tar is compressed" in zipped
    assert last.startswith("3 shards, 4 samples: indexed, 2 damaged")
    index = Path(index_path(str(whole)))
    assert [*out.glob("*.index.json")] == [index]
    assert index.read_bytes() == expected[index.name]
