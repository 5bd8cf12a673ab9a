"""Measures how long a page of 100,000 slices takes to open.

``python tests/helpers/_page_speed.py``: from the navigation until everything is drawn, in a
headless Chromium that is new each time.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter

from _browser import Browser, find_chromium
from _pages import REPORT, read, timeline

from spdl_torch.observe import Profile

ROUNDS = 5


def main():
    """Print the median of some rounds."""
    chromium = find_chromium()
    if chromium is None:
        sys.exit("There is no Chromium.")
    with tempfile.TemporaryDirectory() as folder:
        profile = Profile(REPORT, (timeline(5_000, workers=4),))
        page = profile.write_html(Path(folder) / "p.html", max_events=400_000)
        spans = read(page).figures["timelines"][0]["spans"]
        seconds = []
        for number in range(ROUNDS):
            with Browser(chromium, Path(folder) / str(number)) as browser:
                began = perf_counter()
                browser.open(page)
                seconds.append(perf_counter() - began)
                assert browser.problems == []
        num_spans, num_bytes = sum(each["num_spans"] for each in spans), page.stat().st_size
    print(
        f"{num_spans:,} slices, {num_bytes / 1e6:.1f} MB: "
        f"drawn after {median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f})"
    )


if __name__ == "__main__":
    main()
