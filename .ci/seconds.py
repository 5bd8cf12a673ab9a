"""Print the seconds that the tests of each room took, from a run's junit file; fail if the run took
more than seven minutes."""

from __future__ import annotations

import sys
from collections import Counter
from xml.etree import ElementTree

seconds: Counter[str] = Counter()
tests: Counter[str] = Counter()
run = next(ElementTree.parse(sys.argv[1]).iter("testsuite"))
for case in run.iter("testcase"):
    room = case.get("classname", "").removeprefix("tests.").partition(".")[0]
    seconds[room] += float(case.get("time", 0))
    tests[room] += 1
print("Seconds of the tests by room, all processes together:")
for room, total in seconds.most_common():
    print(f"  {room:12s} {total:7.1f} s  {tests[room]:5d} tests")
print(f"  {'all':12s} {seconds.total():7.1f} s  {tests.total():5d} tests")
wall = float(run.get("time", 0))
if wall > 420:
    sys.exit(f"The run took {wall:.0f} s, and 420 are the most: make tests quicker.")
