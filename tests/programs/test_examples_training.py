"""The training programs that load in one child process: what they train on, and that they learn."""

import importlib
import pickle
import re

import _warm
import pytest
import torch
from _folders import ROOT
from hypothesis import given, strategies as st

SECONDS = 50
"""How long a test waits for a program to end; never how long it should take."""


@pytest.fixture(scope="module", autouse=True)
def examples_can_be_imported():
    """As if a program had been started."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "examples"))
        yield


@pytest.fixture(scope="module")
def language():
    """The program as a module."""
    return importlib.import_module("train_language_model")


@pytest.fixture(scope="module")
def videos():
    """Likewise."""
    pytest.importorskip("av")
    return importlib.import_module("train_video_classifier")


def smoke(program, *options, cwd):
    """The lines of a short run."""
    command = [ROOT / "examples" / program, "--smoke", *options]
    done = _warm.run(command, cwd=cwd, timeout=SECONDS, forks=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


# -- text ------------------------------------------------------------------------------------------


def test_passages_are_what_stands_between_empty_lines(language, tmp_path):
    """Of every file, in order; read from the file again by a copy of the corpus."""
    (tmp_path / "a.txt").write_text("\n\n  one\ntwo\n \n\nthree", encoding="utf-8")
    (tmp_path / "b.txt").write_text("vïer\n\n\n", encoding="utf-8")
    (tmp_path / "c.txt").write_text("\n \n")
    corpus = pickle.loads(pickle.dumps(language.Corpus(language.find_texts(tmp_path))))
    assert list(map(corpus.__getitem__, range(len(corpus)))) == ["one\ntwo", "three", "vïer"]
    with pytest.raises(SystemExit, match=r"must hold \*\.txt files, found none"):
        language.find_texts(tmp_path / "nowhere")


@given(passages=st.lists(st.lists(st.integers(0, 255), max_size=9), min_size=1, max_size=4))
def test_targets_are_what_follows_the_inputs(language, passages):
    """Up to the context's length; padding is not a target."""
    inputs, targets = language.collate(passages, context=6)
    assert inputs.shape == targets.shape
    assert inputs.shape[1] == min(6, 1 + max(map(len, passages)))
    for row, passage in enumerate(passages):
        count = min(6, len(passage) + 1)
        followed = [*passage, language.END][:count]
        assert targets[row].tolist() == followed + [language.PADDING] * (len(targets[row]) - count)
        assert inputs[row, :count].tolist() == [language.END, *followed[:-1]]


def test_language_model_sees_the_past_alone(language):
    """A later token changes nothing of what is predicted before it."""
    torch.manual_seed(0)
    model = language.LanguageModel(num_tokens=30, context=8, width=32, num_layers=2).eval()
    tokens = torch.arange(8)[None]
    changed = tokens.clone()
    changed[0, 5] = 29
    before, after = model(tokens), model(changed)
    assert torch.allclose(before[:, :5], after[:, :5], atol=1e-6)
    assert not torch.allclose(before[:, 5:], after[:, 5:], atol=1e-6)


EPOCH = r"epoch (\d)  (\d+) \w+  loss ([\d.]+)  .*waited for data \d+%"


def test_language_model_learns_from_a_child_process(tmp_path):
    """Every epoch has all passages, one after the other; the loss falls."""
    lines = smoke("train_language_model.py", cwd=tmp_path)
    assert lines[0] == "240 passages, a vocabulary of 279 tokens"
    epochs = [re.match(EPOCH, line).groups() for line in lines[1:-1]]
    assert [(number, passages) for number, passages, _ in epochs] == [(n, "240") for n in "123"]
    losses = [float(loss) for *_, loss in epochs]
    assert losses == sorted(losses, reverse=True)
    assert re.match(r"after 'an owl likes the': ('.+'$|nothing, the model ends)", lines[-1])


# -- videos ----------------------------------------------------------------------------------------


def test_folder_of_videos_is_a_class_for_each(videos, tmp_path):
    """And class folders are as Kinetics' program has them; nothing has to be said."""
    from _k400 import write_videos

    write_videos(tmp_path, num_classes=2, per_class=3)
    classes, training, validation = videos.find_videos(tmp_path)
    assert (list(classes), len(training), len(validation)) == (["class_0", "class_1"], 4, 2)
    classes, training, validation = videos.find_videos(tmp_path / "class_1")
    assert list(classes) == ["000", "001", "002"]
    assert training == validation
    assert [video.label for video in training] == [0, 1, 2]
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit, match=r"--data: .*no videos"):
        videos.find_videos(tmp_path / "empty")


def test_clip_is_of_the_video_with_that_number(videos, tmp_path):
    """Also in another process; for training at random, for validation the same every time."""
    from _k400 import write_videos

    write_videos(tmp_path, num_classes=1, per_class=2)
    _, listed, _ = videos.find_videos(tmp_path / "class_0")
    load = videos.LoadClip(videos=listed, num_frames=3, pixels=16, seconds=None)
    copy = pickle.loads(pickle.dumps(load))
    clips, labels = videos.collate([load(0), copy(1)])
    assert clips.shape == (2, 3, 16, 16, 3)
    assert clips.dtype == torch.uint8
    assert labels.tolist() == [0, 1]
    assert torch.equal(clips[1], load(1)[0])
    at_random = videos.LoadClip(videos=listed, num_frames=3, pixels=16, seconds=0.5)
    torch.manual_seed(0)
    drawn = [at_random(0)[0] for _ in range(4)]
    assert any(not torch.equal(clip, drawn[0]) for clip in drawn)


def test_video_classifier_learns_from_a_child_process(tmp_path):
    """Every epoch has all clips that fill a batch; validation has every video that is held out."""
    pytest.importorskip("av")
    lines = smoke("train_video_classifier.py", cwd=tmp_path)
    assert lines[0] == "10 videos to train on and 2 to validate, 2 classes"
    epochs = [re.match(EPOCH, line).groups() for line in lines[1:]]
    assert [(number, clips) for number, clips, _ in epochs] == [(n, "10") for n in "123"]
    assert all(re.search(r"validation (0|50|100)%$", line) for line in lines[1:])


# -- images in a table -----------------------------------------------------------------------------


def test_fine_tuning_goes_on_where_it_was_saved(tmp_path):
    """After its one epoch nothing is left; the report says where the workers are."""
    pytest.importorskip("pyarrow")
    saving = "--checkpoint", "saved.pt"
    lines = smoke("finetune_parquet.py", *saving, cwd=tmp_path)
    assert lines[0].startswith("epoch 0: loss of the last batch")
    assert "thread_safe = True" in "".join(lines)
    assert smoke("finetune_parquet.py", *saving, cwd=tmp_path) == []
    saved = torch.load(tmp_path / "saved.pt")
    assert saved["epoch"] == 1
    assert saved["loader"]["finished"]
