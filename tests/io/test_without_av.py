"""PyAV is needed by video and sound alone: the rest loads where it is not installed."""

import json
import subprocess
import sys

import pytest
from _folders import HELPERS
from _without_av import NEEDS_AV

PROGRAM = HELPERS / "_without_av.py"
ADVICE = "pip install 'av>=18'"


@pytest.fixture(scope="module")
def facts():
    """What the program found."""
    command = [sys.executable, "-W", "ignore", str(PROGRAM)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_images_and_arrays_are_read_without_pyav(facts):
    """Of a folder in every seat, with a random crop; a batch of one call, and an archive."""
    for seat in ("none", "threads", "processes"):
        assert facts["loaded"][seat] == [[4, 3, 16, 16], [0, 0, 1, 1]]
    assert (facts["loaded"]["batch"], facts["loaded"]["npz"]) == ([1, 8, 16, 3], [24, 32, 3])


def test_what_needs_pyav_says_what_to_install(facts):
    """Videos, sound, filters and FFmpeg's versions."""
    names = {"load_video", "load_audio", "load_clip", "filter_desc", "get_ffmpeg_versions"}
    assert facts["refused"].keys() == names
    assert all(ADVICE in said for said in facts["refused"].values()), facts["refused"]


def test_every_other_module_is_imported_without_pyav(facts):
    """A module that imports PyAV for something else would be the first to fail."""
    found = facts["not_imported"]
    assert found.keys() == set(NEEDS_AV)
    assert all(ADVICE in said for said in found.values()), found
