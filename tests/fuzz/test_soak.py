"""Loaders and pipelines over and over: memory, threads and descriptors stay where they were."""

import json
import os
import subprocess
import sys
from statistics import median

import pytest
from _folders import HELPERS

PROGRAM = HELPERS / "_soak.py"
HANG_SECONDS = 300
"""More than the rounds take on any machine; this test does not ask how fast they are."""
MOST_RSS_GROWTH = {"short": 1 / 10, "long": 1 / 50}
"""Between the medians of two thirds. The short form has few readings, while caches fill."""
MOST_BLOCKS_PER_ROUND = {"short": 1000, "long": 40}
"""Python objects kept by one round, of which a reading keeps 4 itself. In the first 30 rounds weak
references, free lists and caches still fill, by 100 a round. After that an object for each thread,
batch or sample of a round would be 40, 300 or 2000."""


def soak(seconds=HANG_SECONDS, rounds=sys.maxsize):
    """Rounds and readings, after so many seconds or rounds."""
    # With an arena for each thread, glibc keeps some more of what was freed for as long as threads
    # come and go (6 % in ten minutes); with one, what grows is a leak.
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", PROGRAM, str(seconds), str(rounds)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=1.5 * seconds + 60,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    return report["rounds"], report["readings"]


def assert_flat(rounds, readings, form):
    third = len(readings) // 3
    middle, last = readings[third : 2 * third], readings[-third:]

    def typical(part, what):
        return median(reading[what] for reading in part)

    for what in ("threads", "fds"):
        # The least: a probe that opens a file just now does not leak; what leaks stays open.
        before, after = (min(reading[what] for reading in part) for part in (middle, last))
        assert after <= before, f"{before} {what}, then {after}"
    before, after = typical(middle, "rss_bytes"), typical(last, "rss_bytes")
    assert after <= before * (1 + MOST_RSS_GROWTH[form]), f"{before} bytes, then {after}"
    before, after = typical(middle, "blocks"), typical(last, "blocks")
    grown = (after - before) / (rounds / 3)
    assert grown <= MOST_BLOCKS_PER_ROUND[form], f"{grown} objects a round: {before}, then {after}"
    return {what: (typical(middle, what), typical(last, what)) for what in middle[0]}


@pytest.mark.long
def test_nothing_grows_for_long(long_seconds):
    """For a minute, or however long is asked for; with many rounds less is allowed."""
    rounds, readings = soak(max(60, long_seconds))
    form = "long" if rounds >= 300 else "short"
    print(f"{rounds} rounds; middle and last third: {assert_flat(rounds, readings, form)}")
