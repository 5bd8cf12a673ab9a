"""Damaged files: a result or a DecodeError, in bounded memory; no crash, no hang, nothing else.

The readers run in a process of their own, so that a library that dies is noticed, and its input
kept, among pytest's temporary files.
"""

import json
import random

import pytest
from support import warm
from support.byte_fuzzer import HANG_SECONDS
from support.folders import TESTS


def run(folder, first, count, seconds=0.0):
    """What the program has done, of which it complains about nothing."""
    words = ["-m", "support.byte_fuzzer", folder, first, count, seconds]
    with (folder / "stderr").open("w") as stderr:
        done = warm.run(words, stderr=stderr, cwd=TESTS, timeout=seconds + 4 * HANG_SECONDS)
    if done.returncode != 0:
        name, last_words = (folder / "name").read_text(), (folder / "stderr").read_text()
        pytest.fail(f"{name}, saved as {folder}/input: {done.returncode}\n{last_words[-3000:]}")
    done = json.loads(done.stdout)
    assert not done["findings"], "\n\n".join([f"saved in {folder}:", *done["findings"]])
    return done["executions"], done["accepted"]


def test_damaged_files_are_read_or_refused(tmp_path):
    """The short form: the same inputs in every run; some of them are accepted, most are not."""
    executions, accepted = run(tmp_path, 0, 25)
    assert len(executions) >= 16
    assert set(executions.values()) == {25}
    assert 60 < sum(accepted.values()) < 13 * len(executions), accepted


@pytest.mark.long
def test_damaged_files_are_read_or_refused_for_long(tmp_path, long_seconds):
    """Other inputs in every run."""
    print(run(tmp_path, random.SystemRandom().randrange(10**12), 0, long_seconds))
