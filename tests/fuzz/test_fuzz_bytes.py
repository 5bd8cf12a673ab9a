"""Damaged files: a result or a DecodeError, in bounded memory; no crash, no hang, nothing else.

The readers run in a process of their own, so that a library that dies is noticed, and its input
kept: in the folder that ``SPDL_TORCH_FUZZ_FOLDER`` names, else among pytest's temporary ones.
"""

import json
import os
import random
import shutil
from collections import Counter
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


class Campaign:
    """Runs the program again after each death, and collects what it tells."""

    def __init__(self, folder):
        folder = Path(os.environ.get("SPDL_TORCH_FUZZ_FOLDER") or folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.findings, self.executions, self.accepted = [], Counter(), Counter()
        self.peak_bytes = {}

    def run(self, first, *options, seconds=0.0):
        """Returns whether the program came to its end; if not, ``findings`` has one more."""
        with (self.folder / "stderr").open("w") as stderr:
            done = _warm.run(
                [PROGRAM, self.folder, "--first", first, *options],
                stderr=stderr,
                timeout=seconds + 4 * HANG_SECONDS,
            )
        for line in done.stdout.splitlines():
            self.take(json.loads(line))
        if done.returncode != 0:
            self.take_death(done.returncode)
        return done.returncode == 0

    def take(self, report):
        if "finding" in report:
            self.findings.append(report["finding"])
            return
        self.executions.update(report["executions"])
        self.accepted.update(report["accepted"])
        for name, (peak, number) in report["peak_bytes"].items():
            self.peak_bytes[name] = max(self.peak_bytes.get(name, (0, 0)), (peak, number))
            if peak > MOST_BYTES:
                self.findings.append([name, number, f"took {peak} bytes", "not saved"])

    def take_death(self, code):
        name, number = (self.folder / "name").read_text().split("\0")[0].rsplit(maxsplit=1)
        saved = self.folder / f"death-{name.replace(' ', '_')}-{number}"
        shutil.copy(self.folder / "input", saved)
        last_words = (self.folder / "stderr").read_text(errors="replace")[-3000:]
        self.findings.append([name, int(number), f"exit code {code}\n{last_words}", str(saved)])

    def complaint(self):
        return "\n\n".join(
            f"{name} {number}: {what}\nsaved as {saved}"
            for name, number, what, saved in self.findings
        )


def test_damaged_files_are_read_or_refused(tmp_path):
    """The short form: the same inputs in every run; every reader accepts some of them."""
    campaign = Campaign(tmp_path)
    campaign.run(0, "--count", 80)
    assert not campaign.findings, campaign.complaint()
    assert len(campaign.executions) >= 16
    assert set(campaign.executions.values()) == {80}
    # Neither is everything refused at the first look, nor nothing found wrong.
    for name, count in campaign.accepted.items():
        assert count < 80, name
    assert len(campaign.accepted) == len(campaign.executions)


@pytest.mark.long
def test_damaged_files_are_read_or_refused_for_long(tmp_path, long_seconds):
    """Other inputs in every run; goes on after a death, up to twenty of them."""
    campaign = Campaign(tmp_path)
    end, deaths = monotonic() + long_seconds, 0
    while monotonic() < end and deaths < 20:
        seconds = min(60.0, max(1.0, end - monotonic()))
        first = random.SystemRandom().randrange(10**12)
        deaths += not campaign.run(first, "--seconds", str(seconds), seconds=seconds)
    print(f"{sum(campaign.executions.values())} inputs, {campaign.executions}")
    print(f"accepted: {campaign.accepted}\nmemory: {campaign.peak_bytes}")
    assert not campaign.findings, campaign.complaint()
