"""The ImageNet programs: figures to be trusted, runs that can be resumed, clean ends."""

from __future__ import annotations

import os
import re
import signal
import sys
from contextlib import ExitStack

import imagenet_classification as classification
import pytest
import replace_dataloader
import torch
from support import torchrun, warm
from support.folders import ROOT
from support.later import LIGHTNINGS_WARNINGS

from spdl_torch.demo.photographs import write_photographs
from spdl_torch.errors import DecodeError

EXAMPLES = ROOT / "examples"
NUM_TRAIN, NUM_VALIDATION = 24, 7
RATES = re.compile(r"[\d.]+ images/s|  waiting.*")
"""What depends on how fast the machine is."""

pytestmark = [
    *LIGHTNINGS_WARNINGS,
    pytest.mark.filterwarnings("ignore:.*have overridden `on_after_batch_transfer`"),
]


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    """A small ImageNet: train/ and val/ with ten classes, of which val/ has but seven."""
    folder = tmp_path_factory.mktemp("photographs")
    write_photographs(folder / "train", NUM_TRAIN)
    write_photographs(folder / "val", NUM_VALIDATION, seed=1)
    return folder


@pytest.fixture(autouse=True)
def intra_op_threads():
    """The programs' short form computes with one thread; later tests do with what they had."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def arguments(data, output, *more):
    """One short epoch of a small model, on the CPU, where figures are the same every time."""
    own = ["--smoke", "--data", data, "--output", output, "--epochs", 1, "--image-size", 32]
    small = ["--model", "shufflenet_v2_x0_5", "--device", "cpu"]
    return [str(argument) for argument in (*own, *small, *more)]


def run_here(data, output, *more):
    """Run the plain loop in this process."""
    classification.main(arguments(data, output, *more))


def run(program, *more, ranks=({},)):
    """Run a program in a process of its own, or one for each rank; what the first printed."""
    with ExitStack() as stack:
        environments = [{**os.environ, "OMP_NUM_THREADS": "1", **rank} for rank in ranks]
        started = [warm.start([EXAMPLES / program, *more], env=each) for each in environments]
        processes = [stack.enter_context(each) for each in started]
        outputs = [process.communicate(timeout=50) for process in processes]
    assert not any(process.returncode for process in processes), outputs
    return outputs[0][0]


def validation_of(printed):
    """The last line about validation: figures and number of images."""
    return re.findall(r"validation: (loss .* on \d+ images)", printed)[-1]


def test_ranks_count_each_validation_image_once_of_uneven_shards(photographs, tmp_path, capsys):
    """Two ranks report what one process finds for the checkpoint that they saved."""
    given = arguments(photographs, tmp_path, "--lr", 0.001)
    with torchrun.environments(2) as ranks:
        printed = run("imagenet_classification.py", *given, ranks=ranks)
    assert "2 rank(s)" in printed
    run_here(photographs, tmp_path, "--eval-only", "--weights", tmp_path / "last.pt")
    alone = validation_of(capsys.readouterr().out)
    assert alone.endswith(f"on {NUM_VALIDATION} images")
    assert validation_of(printed) == alone


def test_resumed_run_equals_one_that_was_not_ended(photographs, tmp_path, capsys, monkeypatch):
    """Weights, momentum, order, crops and mixup: the second epoch has the same figures. An earlier
    run is not overwritten when --resume was forgotten."""
    recipe = ("--epochs", 2, "--mixup", 0.2, "--auto-augment", "ta_wide", "--ema-decay", 0.5)
    run_here(photographs, tmp_path / "whole", *recipe)
    whole = capsys.readouterr().out
    save = classification.save

    def save_and_interrupt(path, *state):
        save(path, *state)
        raise KeyboardInterrupt("after the first epoch")

    with monkeypatch.context() as patch:
        patch.setattr(classification, "save", save_and_interrupt)
        with pytest.raises(KeyboardInterrupt, match="after the first epoch"):
            run_here(photographs, tmp_path / "parts", *recipe)
    with pytest.raises(SystemExit, match="2"):
        run_here(photographs, tmp_path / "parts", *recipe)
    assert "Pass --resume" in capsys.readouterr().err
    run_here(photographs, tmp_path / "parts", *recipe, "--resume")
    resumed = capsys.readouterr().out
    second_epoch = "\n".join(re.findall("^epoch 2/2.*", whole, flags=re.M))
    assert second_epoch
    assert RATES.sub("", second_epoch) in RATES.sub("", resumed)
    assert "epoch 1/2" not in resumed


@pytest.mark.cuda
@pytest.mark.parametrize("loader", ["ours", "torch"])
def test_gpu_trains_and_validates_in_half_precision(loader, photographs, tmp_path):
    """fp16 with its scaler on a CUDA device, batches from either loader."""
    recipe = ("--device", "cuda", "--amp", "fp16", "--channels-last", "--loader", loader)
    given = arguments(photographs, tmp_path, *recipe)
    printed = run("imagenet_classification.py", *given, "--mixup", 0.2)
    assert "on cuda:0" in printed
    assert validation_of(printed).endswith(f"on {NUM_VALIDATION} images")
    weights = ("--eval-only", "--weights", tmp_path / "last.pt")
    alone = run("imagenet_classification.py", *given, *weights)
    assert validation_of(alone).endswith(f"on {NUM_VALIDATION} images")


def test_interrupt_ends_the_program_at_once_without_a_traceback(photographs, tmp_path):
    """Ctrl-C: code 130, one line that says how to go on. With the model of the short form."""
    given = arguments(photographs, tmp_path, "--epochs", 10_000, "--model", "resnet18")
    with warm.start([EXAMPLES / "imagenet_classification.py", *given]) as program:
        while "step" not in program.stdout.readline():
            assert program.poll() is None
        program.send_signal(signal.SIGINT)
        _, errors = program.communicate(timeout=50)
    assert program.returncode == 130
    assert "Traceback" not in errors
    assert "interrupted; --resume goes on" in errors


def test_one_folder_is_split_and_a_bad_photograph_is_named(tmp_path):
    """A tenth of it is held out; what cannot be decoded ends the run."""
    folder = tmp_path / "data"
    write_photographs(folder, 12)
    bad = folder / "class_3" / "00003.jpg"
    bad.write_bytes(b"no photograph")
    with pytest.raises(DecodeError, match=str(bad)):
        run_here(folder, tmp_path / "output")


def test_lightning_has_the_figures_of_the_plain_loop(photographs, tmp_path, capsys):
    """The same weights and images; and it trains."""
    pytest.importorskip("lightning")
    import imagenet_lightning

    run_here(photographs, tmp_path, "--lr", 0.001)
    plain = validation_of(capsys.readouterr().out)
    weights = ("--eval-only", "--weights", tmp_path / "last.pt")
    imagenet_lightning.main(arguments(photographs, tmp_path, *weights))
    assert validation_of(capsys.readouterr().out) == plain
    imagenet_lightning.main(arguments(photographs, tmp_path))
    assert (tmp_path / "last.ckpt").exists()
    assert "VERDICT" in capsys.readouterr().out


def test_batches_are_equal_when_one_import_is_replaced(monkeypatch, capsys):
    """The newcomer's program says so, and measures three variants, on photographs that it makes."""
    printed = run("replace_dataloader.py", "--smoke", "--images", 16)
    assert "our DataLoader: none" in printed
    rows = re.findall(r"([\d.]+) s +(\d+) +([\d.]+)$", printed, flags=re.M)
    assert len(rows) == 3
    assert rows[0][2] == rows[1][2], "the losses"
    monkeypatch.setattr(sys, "argv", ["replace_dataloader.py", "--data", "no/such"])
    with pytest.raises(SystemExit, match="2"):
        replace_dataloader.parse()
    assert "no such folder" in capsys.readouterr().err
