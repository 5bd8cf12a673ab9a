"""A headless Chromium, driven over two pipes by its DevTools protocol; no package is needed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
from itertools import count

import pytest

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
    """One page of a browser: the messages on its console, and what it asked the network for."""

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
        self.problems, self.requests = [], []
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=page, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

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

    def open(self, path):
        """Open a file; return when all that is in it is there."""
        self.problems.clear()
        self.requests.clear()
        url = path.resolve().as_uri()
        self.call("Page.navigate", url=url)
        there = f"location.href === {url!r} && document.readyState === 'complete'"
        self.evaluate(
            "new Promise((done) => { const look = () =>"
            f" {there} ? done(true) : setTimeout(look, 10); look(); }})"
        )

    def evaluate(self, expression):
        """The value of an expression, awaited."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def call(self, method, **parameters):
        """The result of a command; events on the way are noted."""
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
            self._note(answer.get("method"), answer.get("params", {}))

    def _next(self):
        while b"\0" not in self._rest:
            part = self._reader.read1(1 << 20)
            if not part:
                raise OSError("the browser has ended")
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def _note(self, method, parameters):
        if method == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning"):
            self.problems.append(str([part.get("value") for part in parameters["args"]]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.problems.append(parameters["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
