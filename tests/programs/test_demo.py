"""The main job: ``python -m spdl_torch demo``."""

import os
import signal

import pytest
from PIL import Image
from support import warm

import spdl_torch
from spdl_torch.__main__ import main
from spdl_torch.demo.command import verdict
from spdl_torch.demo.photographs import write_photographs
from spdl_torch.demo.training import Measurement, check_folder, check_gpu

DEMO = ["-m", "spdl_torch", "demo", "--smoke", "--workers", "1"]


def files_of(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.jpg")}


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photographs")
    write_photographs(folder, 16, seed=1)
    return folder


def test_photographs_are_the_same_for_the_same_seed(photographs, tmp_path):
    """A seed fixes every byte, and the number of photographs does not change the first ones."""
    write_photographs(tmp_path / "same", 2, seed=1)
    write_photographs(tmp_path / "other", 2, seed=2)
    same, other, all_of_them = map(files_of, (tmp_path / "same", tmp_path / "other", photographs))
    assert len(same) == 2
    assert same.items() <= all_of_them.items()
    assert not set(same.values()) & set(other.values())


def test_photographs_resemble_imagenet(photographs):
    """Of both orientations, with ImageNet's 0.2 megapixels and bytes per pixel, about 0.54."""
    sizes, num_bytes, num_pixels = set(), 0, 0
    for path in photographs.rglob("*.jpg"):
        with Image.open(path) as image:
            image.load()
            assert (image.format, image.mode) == ("JPEG", "RGB")
            sizes.add(image.size)
            num_pixels += image.width * image.height
        num_bytes += path.stat().st_size
    assert sizes == {(500, 400), (400, 500)}
    assert 0.5 < num_bytes / num_pixels < 0.6


def measured(loading, training):
    return Measurement(loading, training, 0.9, 0.1)


def test_table_has_medians_spread_and_ratios(photographs, monkeypatch, capsys):
    """Of the others over the first, 100 columns at most. Each second round goes the other way."""
    same, twice = (600.0, 640.0), (1200.0, 1280.0)
    rates = iter([same[0], same[0], twice[0], twice[1], same[1], same[1]])

    def apart(work, *_):
        return measured(rate := next(rates), rate) if work.__name__ == "measure" else ""

    monkeypatch.setattr("spdl_torch.demo.command._apart", apart)
    assert main(["demo", "--data", str(photographs), "--rounds", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (start,) = (n for n, line in enumerate(lines) if line.startswith("loading alone"))
    over, _, first, *others = lines[start - 2 : start + 4]
    assert over.split()[-3:] == ["2nd/1st", "3rd/1st", "better"]
    row = "loading alone images/s 620 ±20 620 ±20 1240 ±40 1.00x 2.00x higher"
    assert " ".join(first.split()) == row
    assert [line[:24].strip() for line in others] == [
        *("training light network", "waiting for data", "time to first batch"),
    ]
    assert {len(line) for line in (first, *others)} == {len(over)}
    assert len(over) < 100


@pytest.mark.parametrize(
    ("ours", "found"),
    [
        ((1160.0, 1218.0), "): faster."),
        ((290.0, 300.0), "): slower: keep torch's for this dataset."),
        ((560.0, 1160.0), "): about level; --rounds 20"),
        ((590.0, 590.0), "): about level; --rounds 20"),
    ],
)
def test_verdict(ours, found):
    """A difference counts when it is above 5 % and each round has it."""
    torchs, with_ours = [measured(600.0, 580.0)] * 2, [measured(600.0, rate) for rate in ours]
    measurements = {("torch", "DataLoader"): torchs, ("spdl_torch", "DataLoader"): with_ours}
    text = " ".join(verdict(measurements).split())
    assert found in text
    assert f"({min(ours) / 580:.2f} to {max(ours) / 580:.2f} over the rounds" in text


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["x"], "must be a folder with one folder of images per class"),
        (["x/a/x.JPEG", "x/b/readme.txt"], "Found no valid file for the classes b"),
    ],
)
def test_bad_data_is_one_line_and_status_2(tmp_path, capsys, names, message):
    """What was expected, what torchvision found and what to do; no traceback."""
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert main(["demo", "--data", str(tmp_path / "x")]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "--data" in error
    assert message in error
    assert str(tmp_path / "x") in error or message.startswith("Found no valid file")


def test_version_is_printed(capsys):
    """As other programs do."""
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"spdl-torch {spdl_torch.__version__}\n"


@pytest.mark.parametrize("option", ["--workers=0", "--rounds=2.5"])
def test_counts_are_whole_and_positive(option, capsys):
    """Anything else is refused in words."""
    with pytest.raises(SystemExit, match="2"):
        main(["demo", option])
    name, value = option.split("=")
    refused = f"argument {name}: must be a whole number of 1 or more, got {value}"
    assert refused in capsys.readouterr().err


def test_photographs_for_trying_out_are_a_tree_for_image_folder(tmp_path, capsys):
    """Two classes in each of two folders; what is there already is left alone."""
    assert main(["photographs", str(tmp_path), "--count", "2"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'train'}\n{tmp_path / 'val'}\n"
    for split in ("train", "val"):
        check_folder(tmp_path / split)
        assert len(files_of(tmp_path / split)) == 2
    before = files_of(tmp_path)
    assert len(set(before.values())) == 4
    assert main(["photographs", str(tmp_path)]) == 2
    assert "train is there already. Remove it, or give another" in capsys.readouterr().err
    assert files_of(tmp_path) == before


@pytest.fixture
def environment(tmp_path):
    """The demo's temporary folder goes into ``tmp_path``."""
    return {**os.environ, "TMPDIR": str(tmp_path)}


def test_smoke_run(tmp_path, environment):
    """The main job in its short form: every row, every column, and no file left."""
    done = warm.run(DEMO, env=environment)
    assert done.returncode == 0, done.stderr
    assert "32 images" in done.stdout
    assert "n/a" not in done.stdout
    for row in ("loading alone", "training light", "time to first"):
        (line,) = [line for line in done.stdout.splitlines() if line.startswith(row)]
        assert len(line.split()) >= 3 + 3
    assert "1st" not in done.stdout
    assert "\n3/3: spdl_torch +ImageFolder\n" in done.stderr
    assert done.stderr.startswith("10 to 20 seconds.")
    assert not list(tmp_path.glob("spdl-torch-demo-*"))


@pytest.mark.parametrize(("moment", "table"), [("writing 32 photographs", 0), ("2/3", 1)])
def test_interrupt(tmp_path, photographs, environment, moment, table):
    """Ctrl-C: the measurements so far, status 130, no traceback, no folder left."""
    command = [*DEMO, "--data", str(photographs)] if table else DEMO
    with warm.start(command, env=environment) as demo:
        assert any(moment in line for line in demo.stderr)
        demo.send_signal(signal.SIGINT)
        out, err = demo.communicate()
    assert demo.returncode == 130
    assert "Traceback" not in err
    assert "Interrupted." in out
    assert out.count("higher") == 0
    assert out.count("training light network") == table
    assert not list(tmp_path.glob("spdl-torch-demo-*"))


def test_reader_that_has_seen_enough_gets_no_traceback(tmp_path):
    """As with ``| head``."""
    reader, writer = os.pipe()
    os.close(reader)
    photographs = ["photographs", str(tmp_path), "--count", "1", "--classes", "1"]
    done = warm.run(["-m", "spdl_torch", *photographs], stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_failing_run_shows_the_cause(tmp_path):
    """Status 1, the part of the demo that failed, and the loader's own error."""
    (tmp_path / "class_0").mkdir()
    (tmp_path / "class_0" / "broken.jpg").write_bytes(b"not a photograph")
    done = warm.run([*DEMO, "--data", str(tmp_path)])
    assert done.returncode == 1
    assert "spdl-torch demo: 1/3: torch DataLoader: the process ended" in done.stderr
    assert "broken.jpg" in done.stderr


@pytest.mark.cuda
def test_batches_arrive_whole_on_this_gpu():
    """From threads and from processes, each batch dropped while a late kernel reads it."""
    assert check_gpu(2).count("50 batches to the GPU: all whole") == 2
