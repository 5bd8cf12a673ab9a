"""Made-up runs, and pages of reports as a reader sees them."""

from __future__ import annotations

import base64
import random
from html.parser import HTMLParser

from spdl_torch.engine.timeline import (
    Instant,
    Outcome,
    Part,
    QueueTrack,
    Row,
    Timeline,
    Turn,
    TwoClocks,
)
from spdl_torch.observe import Probes, make_report
from support.readings import pipeline_stats, stage

HOSTILE = "</script><script>window.pwned = 1</script><img src=http://x.invalid/a onerror=pwned=1>"
FORMULAS = r"$$\frac{1}{2}$$ \(a\) \[b\] @left $x"
MS = 1_000_000


def reports(num_intervals, *, stages=("fetch", "collate")):
    """The readings of a run at the end of each interval, which is a second and a bit."""
    generator, seconds, num_items, found = random.Random(0), 0.0, 0, []
    for _ in range(num_intervals):
        seconds += 1 + generator.random()
        num_items += round(100 * (1 + 0.1 * generator.random()))
        counts = {"num_tasks": num_items, "num_failures": 1, "num_delivered": num_items - 1}
        made = [stage(name, 0.2, threads=2, seconds=seconds, **counts) for name in stages]
        stats = pipeline_stats(seconds, 0.4, made)
        found.append(make_report(stats, Probes(gil_seconds=1e-4, num_cores=2), pooled=stages))
    return found


def timeline(num_turns):
    """What some workers and a training loop did, with a queue, parts and a garbage collection."""
    rows, workers = [], 3
    for worker in range(workers):
        turns, parts, time = [], [], worker * MS // 7
        for turn in range(num_turns):
            start = time + 100_000 + (turn * 7919) % 300_000
            end = start + MS + (turn * 104_729) % MS
            number = turn * workers + worker
            outcome = Outcome.FAILED if number == 5 else Outcome.PASSED
            turns.append(Turn(time, start, end, end, MS // 3, number, number, 1, turn % 3, outcome))
            parts.append(Part("collate", end - MS // 8, end, MS // 9))
            time = end
        rows.append(Row("worker", 1, worker, "stage", worker + 1, tuple(turns), tuple(parts)))
    steps, time = [], 0
    for batch in range(num_turns * workers):
        end = time + MS // 2
        steps.append(Turn(time, time + MS // 4, end, end, -1, batch, -1, 2, -1))
        time = end
    rows.append(Row("training", 2, 0, "consumer", 99, tuple(steps)))
    instants = (Instant(3 * MS, "gc", {"generation": 2, "seconds": 0.002}),)
    clock = TwoClocks(perf_ns=0, system_ns=1_800_000_000_000_000_000)
    return Timeline("DataLoader", 1, clock, tuple(rows), (QueueTrack(1, "ready", 8),), instants)


REPORT = reports(2)[-1]


class Reader(HTMLParser):
    """A page's elements, which have to be closed in their order, its texts and its images."""

    VOID = frozenset({"meta", "img"})

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.tags, self.attributes, self.texts, self.images, self._open = [], [], [], [], []
        self.feed(text)
        self.close()
        assert self._open == [], "not closed"

    def handle_starttag(self, tag, attrs):
        """Note the element."""
        self.tags.append(tag)
        self.attributes += attrs
        if tag == "img":
            kind, _, content = dict(attrs)["src"].partition(",")
            assert kind == "data:image/svg+xml;base64"
            self.images.append(base64.b64decode(content).decode())
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_endtag(self, tag):
        """It closes the one opened last."""
        assert self._open.pop() == tag, self.getpos()

    def handle_data(self, data):
        """Note a text."""
        if self._open[-1:] != ["style"] and data.strip():
            self.texts.append(data)


def read(path):
    """A page, parsed."""
    return Reader(path.read_text(encoding="utf-8"))
