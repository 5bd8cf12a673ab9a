"""Damaged files: a result or a DecodeError, in bounded memory; no crash, no hang, nothing else.

The readers run in a process of their own, so that a library that dies is noticed, and its input
kept: in the folder that ``SPDL_TORCH_FUZZ_FOLDER`` names, else among pytest's temporary ones.
"""

import json
import os
import random
import shutil
from pathlib import Path
from time import monotonic

import _warm
import pytest
from _byte_fuzzer import HANG_SECONDS, MEBIBYTE
from _folders import HELPERS

PROGRAM = HELPERS / "_byte_fuzzer.py"
MOST_BYTES = 1400 * MEBIBYTE
"""For one small input. Pillow's limit lets a GIF of 179 megapixels pass, which takes it 4 bytes a
pixel and us 3; our own readers take no more than there is to read."""


def run(folder, first, *options, seconds=0.0):
    """What the program found, its death included, and what it tells in the end (None if it died).

    The folder is the one that ``SPDL_TORCH_FUZZ_FOLDER`` names, if any."""
    folder = Path(os.environ.get("SPDL_TORCH_FUZZ_FOLDER") or folder)
    folder.mkdir(parents=True, exist_ok=True)
    words, patience = [PROGRAM, folder, "--first", first, *options], seconds + 4 * HANG_SECONDS
    with (folder / "stderr").open("w") as stderr:
        done = _warm.run(words, stderr=stderr, timeout=patience)
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    findings = [report["finding"] for report in reports if "finding" in report]
    if done.returncode != 0:
        name, number = (folder / "name").read_text().split("\0")[0].rsplit(maxsplit=1)
        saved = folder / f"death-{name.replace(' ', '_')}-{number}"
        shutil.copy(folder / "input", saved)
        last_words = (folder / "stderr").read_text(errors="replace")[-3000:]
        what = f"exit code {done.returncode}\n{last_words}"
        return [*findings, [name, number, what, str(saved)]], None
    summary = reports[-1]
    findings += [
        [name, number, f"took {peak} bytes", "not saved"]
        for name, (peak, number) in summary["peak_bytes"].items()
        if peak > MOST_BYTES
    ]
    return findings, summary


def complaint(findings):
    return "\n\n".join(f"{name} {n}: {what}\nsaved as {saved}" for name, n, what, saved in findings)


def test_damaged_files_are_read_or_refused(tmp_path):
    """The short form: the same inputs in every run; every reader accepts some of them."""
    findings, summary = run(tmp_path, 0, "--count", 80)
    assert not findings, complaint(findings)
    executions, accepted = summary["executions"], summary["accepted"]
    assert len(executions) >= 16
    assert set(executions.values()) == {80}
    # Neither is everything refused at the first look, nor nothing found wrong.
    assert all(count < 80 for count in accepted.values()), accepted
    assert len(accepted) == len(executions)


@pytest.mark.long
def test_damaged_files_are_read_or_refused_for_long(tmp_path, long_seconds):
    """Other inputs in every run; goes on after a death, up to twenty of them."""
    end, deaths, findings = monotonic() + long_seconds, 0, []
    while monotonic() < end and deaths < 20:
        seconds = min(60.0, max(1.0, end - monotonic()))
        first = random.SystemRandom().randrange(10**12)
        found, summary = run(tmp_path, first, "--seconds", str(seconds), seconds=seconds)
        findings += found
        deaths += summary is None
        print(summary)
    assert not findings, complaint(findings)
