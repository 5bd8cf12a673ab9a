"""``check-gpu``: on a device that is not a GPU its checks find what is wrong, in time."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from _lazy_gpu import gpu, lines_of
from _loader_helpers import no_thread_left

from spdl_torch.__main__ import main
from spdl_torch.check_gpu import command, correctness, exits, rates
from spdl_torch.check_gpu.sheet import Sheet
from spdl_torch.io._transfer import transfer

__all__ = ["gpu", "no_thread_left"]

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


PROMPT = pytest.mark.parametrize("gpu", [{"is_prompt": True}], indirect=True)


@pytest.mark.parametrize(
    ("gpu", "outcome"), [({"is_prompt": True}, "PASS"), ("late", "FAIL")], indirect=["gpu"]
)
def test_tensors_are_compared(gpu, outcome):
    """They are right when they have arrived; where nobody waits for that, they are not."""
    found = lines_of(partial(correctness.check_batches, gpu))
    assert found == [("batch_equals_to", outcome)]


@PROMPT
def test_tensors_that_stay_on_the_host_are_found(gpu, monkeypatch):
    """Though they equal what was sent."""
    staying = SimpleNamespace(stage=lambda batch: SimpleNamespace(receive=lambda: batch))
    monkeypatch.setattr(correctness, "Transfer", lambda device: staying)
    found = lines_of(partial(correctness.check_batches, gpu))
    assert found == [("batch_equals_to", "FAIL")]


def outcomes_of_loaders(gpu, **options):
    """Without workers, on threads, in processes."""
    return [outcome for _, outcome in lines_of(partial(correctness.check_loaders, gpu), **options)]


@PROMPT
def test_batches_of_loaders_are_compared(gpu, monkeypatch):
    """With torch's, one by one: two that have changed places do not pass, nor those that stay."""
    assert outcomes_of_loaders(gpu) == ["PASS"] * 3
    assert outcomes_of_loaders(gpu, device="cpu") == ["FAIL"] * 3
    monkeypatch.setattr(correctness, "DataLoader", Backwards)
    assert outcomes_of_loaders(gpu) == ["FAIL"] * 3


class Backwards(correctness.DataLoader):
    """A loader whose batches come in another order."""

    def __iter__(self):
        return reversed(list(super().__iter__()))


def test_lines_are_printed_and_kept(tmp_path):
    """At once, in the form that is promised; the file is whole after each of them."""
    path, out = tmp_path / "found.json", io.StringIO()
    sheet = Sheet(out, {"device": "none"}, path)
    sheet.at_most("wrong", 0, 0)
    assert json.loads(path.read_text())["passed"] is True
    sheet.at_least("ratio", 0.94, 0.95)
    sheet.note("rate", 51.23456)
    sheet.skip("clips", "no PyAV here")
    sheet.fail("copies", "OSError: no")
    assert out.getvalue().splitlines() == [
        "wrong 0 <= 0 PASS",
        "ratio 0.94 >= 0.95 FAIL",
        "rate 51.23 - PASS",
        "clips (no PyAV here) - SKIP",
        "copies (OSError: no) - FAIL",
    ]
    written = json.loads(path.read_text())
    assert (written["device"], written["passed"], len(written["lines"])) == ("none", False, 5)
    skipped = Sheet(io.StringIO(), {})
    skipped.skip("all", "nothing could be checked here, so nothing is in order")
    assert not skipped.has_passed
    second = {"name": "ratio", "value": 0.94, "limit": ">= 0.95", "outcome": "FAIL"}
    assert written["lines"][1] == second


def cut_off(path, device, *, at):
    """A run of three groups that ends before a check; returns the sheet and what was run."""
    sheet, run = Sheet(io.StringIO(), {"device": device}, path), []
    if path.exists():
        sheet.take_up()
    groups = {
        group: [(f"{group}{n}", partial(sheet.note, f"{group}{n}", n)) for n in range(2)]
        for group in ("races", "exits", "rates")
    }
    for name, check in command.chosen_checks(groups, sheet, ()):
        if name == at:
            break
        run.append(name)
        check()
    return sheet, run


def test_run_that_was_cut_off_goes_on_with_the_next_group(tmp_path):
    """Whole groups keep their lines; one that was cut off is run again from its beginning."""
    path = tmp_path / "found.json"
    _, run = cut_off(path, "one", at="exits1")
    assert run == ["races0", "races1", "races", "exits0"]
    _, run = cut_off(path, "one", at=None)
    assert run == ["exits0", "exits1", "exits", "rates0", "rates1", "rates"]
    names = [line["name"] for line in json.loads(path.read_text())["lines"]]
    assert names == [f"{group}{n}" for group in ("races", "exits", "rates") for n in range(2)]
    with pytest.raises(ValueError, match="is of device 'one', and this is 'two': begin anew"):
        cut_off(path, "two", at=None)
    path.write_text("[]")
    with pytest.raises(ValueError, match=r"found\.json is no file of check-gpu"):
        cut_off(path, "one", at=None)


def test_check_that_breaks_is_a_line_and_the_rest_goes_on():
    """With the error's type and the first line of its text."""
    out, calls = io.StringIO(), []

    def broken():
        raise ValueError("first\nsecond")

    sheet = Sheet(out, {})
    checks = [("one", broken), ("two", lambda: calls.append(2))]
    command.run_checks(checks, sheet, 100, end=calls.clear)
    assert calls == [2]
    assert out.getvalue().startswith("one (ValueError: first) - FAIL\nseconds ")
    assert not sheet.has_passed


def test_check_that_hangs_is_named_and_ended():
    """Whatever it waits for: the process ends."""
    out, ended = io.StringIO(), threading.Event()
    command.run_checks([("copies", lambda: ended.wait(10))], Sheet(out, {}), 0.01, end=ended.set)
    assert out.getvalue().startswith("copies (unfinished after 0.01 s in all) - FAIL\n")


ENDS = """
import sys, tempfile
from spdl_torch.check_gpu.command import _end_process
with tempfile.TemporaryDirectory() as folder:
    print(folder)
    open(folder + "/photograph", "w").close()
    _end_process(sys.stdout, folder)
"""


def test_nothing_is_left_when_the_time_is_up():
    """The photographs go with the process, whose ``with`` does not come to its end."""
    options = {"capture_output": True, "text": True, "timeout": 50}
    ended = subprocess.run([sys.executable, "-c", ENDS], check=False, **options)
    assert ended.returncode == 1
    folder = Path(ended.stdout.strip())
    assert folder.parent.is_dir()
    assert not folder.exists()


PRELUDE = 'import os, signal, sys\nif True:  # {options}\n    print("READY", flush=True)\n'
ENDINGS = {
    "good": (exits.Ending("good", "", 0), "exit_good_seconds PASS"),
    "status": (exits.Ending("status", "sys.exit(3)", 3), "exit_status_seconds PASS"),
    "other": (exits.Ending("other", "sys.exit(3)", 0), "exit_other FAIL"),
    "loud": (exits.Ending("loud", "sys.stderr.write('a word')", 0), "exit_loud FAIL"),
    "aborts": (exits.Ending("aborts", "os.abort()", 0), "exit_aborts FAIL"),
    "signal": (
        exits.Ending("signal", "signal.pause()", -2, signal=2, is_quiet=False),
        "exit_signal_seconds PASS",
    ),
    "hangs": (exits.Ending("hangs", "signal.pause()", 0), "exit_hangs FAIL"),
}


def test_endings_are_distinguished(monkeypatch):
    """By their status, by what they write, and whether they end at all."""
    for name, (ending, expected) in ENDINGS.items():
        monkeypatch.setattr(exits, "_PATIENCE_SECONDS", 2 if name == "hangs" else 30)
        (line,) = lines_of(exits.check_exits, endings=[ending], prelude=PRELUDE)
        assert " ".join(line) == expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_command_says_so_when_there_is_no_gpu(capsys):
    """With a status of its own: nothing was found wrong, and nothing right."""
    assert main(["check-gpu"]) == 2
    assert "torch finds no CUDA device here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--only", "speed"],
            "--only takes correctness, races, exits, capture, memory, rates, got",
        ),
        (["--data", "nowhere"], "nowhere is not a folder."),
        (["--json", "nowhere/found.json"], "nowhere is not a folder to write to."),
    ],
)
def test_command_refuses_what_it_cannot_do(arguments, message, capsys):
    """Before anything is checked."""
    assert main(["check-gpu", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.fixture
def single_calls_own_transfers(monkeypatch):
    """Transfers of functions that copy by themselves end with the test, and their threads too."""
    monkeypatch.setattr(transfer, "shared_transfers", {})


@pytest.mark.cuda
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("single_calls_own_transfers")
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # torch.compile's own
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
@pytest.mark.parametrize("group", [name for name in command.CHECKS if name != "rates"])
def test_group_of_checks_passes_on_this_gpu(group, tmp_path, capsys):
    """What the other tests here show to find what is wrong finds nothing."""
    status = main(["check-gpu", "--json", str(tmp_path / "found.json"), "--only", group])
    assert status == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    ("ours", "alone", "torchs", "over_synthetic", "over_torch"),
    [
        (9.9, 30, 10.0, "PASS", "PASS"),  # the GPU is the limit, and the rest is noise
        (9.0, 30, 4, "FAIL", "PASS"),  # the loader could, and does not
        (5.0, 5.2, 4, "SKIP", "PASS"),  # the cores are the limit
        (5.0, 5.2, 6, "SKIP", "FAIL"),  # and torch does more with them
        (5.0, 5.0, 4, "SKIP", "PASS"),  # and loads more, alone
    ],
)
def test_training_is_judged_by_what_the_machine_can(
    ours, alone, torchs, over_synthetic, over_torch
):
    """Full speed is asked for where loading alone is fast enough, more than torch's loader where
    loading is the limit."""
    found = {"synthetic": 10.0, "ours": ours, "torch": torchs}
    found |= {"ours alone": alone, "torch alone": 5.1}
    out = io.StringIO()
    rates.judge_training(Sheet(out, {}), found)
    lines = {line.split()[0]: line.split()[-1] for line in out.getvalue().splitlines()}
    assert lines["train_ours_over_synthetic"] == over_synthetic
    assert lines["train_ours_over_torch"] == over_torch
    assert lines["load_ours_images_per_second"] == "PASS"
    assert lines["load_ours_over_torch"] == ("FAIL" if alone < 5.1 else "PASS")
