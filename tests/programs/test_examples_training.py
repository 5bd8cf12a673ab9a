"""The training programs that load in one child process: what they train on, and that they learn."""

import re

import _warm
import pytest
import torch
from _folders import ROOT

SECONDS = 50
"""How long a test waits for a program to end; never how long it should take."""


def smoke(program, *options, cwd):
    """The lines of a short run."""
    command = [ROOT / "examples" / program, "--smoke", *options]
    done = _warm.run(command, cwd=cwd, timeout=SECONDS, forks=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


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


def test_video_classifier_learns_from_a_child_process(tmp_path):
    """Every epoch has all clips that fill a batch; validation has every video that is held out."""
    pytest.importorskip("av")
    lines = smoke("train_video_classifier.py", cwd=tmp_path)
    assert lines[0] == "10 videos to train on and 2 to validate, 2 classes"
    epochs = [re.match(EPOCH, line).groups() for line in lines[1:]]
    assert [(number, clips) for number, clips, _ in epochs] == [(n, "10") for n in "123"]
    assert all(re.search(r"validation (0|50|100)%$", line) for line in lines[1:])


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
