"""Loaders and pipelines over and over: memory, threads and descriptors stay where they were.

As a program, with SECONDS, this file uses them in every way and measures itself. It prints JSON:
the number of rounds, and about 100 readings of what must not grow, each taken between two rounds,
when nothing is under way but one loader whose workers live through the whole run.
"""

import ctypes
import gc
import json
import logging
import os
import resource
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from statistics import median
from time import monotonic

import pytest
import torch
from support.datasets import MapData, StreamData
from support.folders import ROOT, TESTS
from support.gates import Boom
from support.loaders import assert_threads_end, loader_threads
from support.stages import AGGREGATES, OPS, Plan, add

import spdl_torch
from spdl_torch.errors import PipelineFailure
from spdl_torch.pipeline import PipelineBuilder

NUM_READINGS = 100


def DataLoader(dataset, *args, num_workers, **options):
    """An odd number of workers are threads, an even number live where the default puts them."""
    options["isolation"] = "thread" if num_workers % 2 else "auto"
    return spdl_torch.DataLoader(dataset, *args, num_workers=num_workers, **options)


def leave(loader, after=-1):
    """Iterate it, to its end or until after a batch."""
    for number, _ in enumerate(loader):
        if number == after:
            break


def loaders(survivor):
    for num_workers in (0, 1, 2, 3):
        leave(DataLoader(MapData(40), batch_size=4, num_workers=num_workers, shuffle=True))
        leave(DataLoader(StreamData(40), num_workers=num_workers, in_order=False), 5)
        iter(DataLoader(MapData(40), num_workers=num_workers))  # started, never asked
    new = DataLoader(MapData(40), batch_size=4, num_workers=2, persistent_workers=True)
    for loader in (new, survivor):
        leave(loader)
        leave(loader, 3)
        leave(loader)
        str(loader.report())
    batches = iter(DataLoader(MapData(20, {5: Boom, 9: KeyError}), batch_size=2, num_workers=2))
    ended = object()
    while True:
        with suppress(Boom, KeyError):
            if next(batches, ended) is ended:
                return


def pipelines(survivor):
    for concurrency in (1, 3):
        builder = PipelineBuilder().add_source(range(30))
        for kind in (*OPS, *AGGREGATES):
            if not kind.startswith("executor"):
                add(builder, Plan(kind, concurrency, concurrency == 3, None, 3), None)
        builder.add_sink()
        list(builder.build(max_failures=10_000))
        pipeline = builder.build(max_failures=10_000)
        with pipeline.auto_stop():
            for _, _ in zip(range(3), pipeline, strict=False):
                pipeline.snapshot()
            pipeline.timeline()
        next(iter(builder.build(max_failures=10_000)), None)  # dropped
        with suppress(PipelineFailure):
            list(builder.build(max_failures=1))


ACTIVITIES = loaders, pipelines


def reading():
    """What must not grow."""
    deadline = monotonic() + 30
    gc.collect()
    while len(loader_threads()) > 4 and monotonic() < deadline:
        for thread in loader_threads():
            thread.join(0.01)  # asked to end, on its way
    # Memory that was given back to the allocator has not leaked: let it give it back to the system.
    ctypes.CDLL(None).malloc_trim(0)
    names = [thread.name for thread in threading.enumerate()]
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "rss_bytes": pages * resource.getpagesize(),
        "blocks": sys.getallocatedblocks(),
        # Without the survivor's that receives batches, from an epoch on in which that took long.
        "threads": len(names) - ("spdl-receive" in names),
        "fds": len(os.listdir("/proc/self/fd")),
    }


def main(seconds):
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    survivor = DataLoader(MapData(40), batch_size=4, num_workers=2, persistent_workers=True)
    for activity in ACTIVITIES:
        activity(survivor)
    gc.collect()
    gc.freeze()  # what torch has brought is not looked through at every reading
    began, rounds, readings = monotonic(), 0, []
    while (passed := monotonic() - began) < seconds:
        for activity in ACTIVITIES:
            activity(survivor)
        rounds += 1
        if passed >= seconds / NUM_READINGS * len(readings):
            readings.append(reading())
    print(json.dumps([rounds, readings]))
    del survivor
    assert_threads_end()


def assert_flat(rounds, readings):
    """Compare the middle and the last third, and return what is typical of both."""
    third = len(readings) // 3
    thirds = readings[third : 2 * third], readings[-third:]
    typical = {what: [median(r[what] for r in part) for part in thirds] for what in readings[0]}
    for what in ("threads", "fds"):
        # The least: a probe that opens a file just now does not leak; what leaks stays open.
        before, after = (min(reading[what] for reading in part) for part in thirds)
        assert after <= before, f"{before} {what}, then {after}"
    # In the first rounds weak references, free lists and caches still fill, by 100 objects a round.
    # After that one for each thread, batch or sample of a round would be 40, 300 or 2000; a reading
    # keeps 4 itself.
    most_share, most_blocks = (1 / 50, 40) if rounds >= 300 else (1 / 10, 1000)
    before, after = typical["rss_bytes"]
    assert after <= before * (1 + most_share), f"{before} bytes, then {after}"
    before, after = typical["blocks"]
    grown = (after - before) / (rounds / 3)
    assert grown <= most_blocks, f"{grown} objects a round: {before}, then {after}"
    return typical


@pytest.mark.long
def test_nothing_grows_for_long(long_seconds):
    """For a minute, or however long is asked for; with many rounds less is allowed."""
    seconds = max(60, long_seconds)
    # With an arena for each thread, glibc keeps some more of what was freed for as long as threads
    # come and go (6 % in ten minutes); with one, what grows is a leak.
    own = {"MALLOC_ARENA_MAX": "1", "PYTHONPATH": f"{TESTS}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, str(seconds)],
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        timeout=1.5 * seconds + 60,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rounds, readings = json.loads(done.stdout)
    print(f"{rounds} rounds; middle and last third: {assert_flat(rounds, readings)}")


if __name__ == "__main__":
    main(float(sys.argv[1]))
