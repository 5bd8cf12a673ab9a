"""A web server that answers late and slowly, as one far away does."""

from __future__ import annotations

import multiprocessing
import time
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

_LATENCY_SECONDS = 0.02
_BYTES_A_SECOND = 50e6


class _Slow(SimpleHTTPRequestHandler):
    """Answers each request 20 ms late, and sends 50 MB a second on a connection."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        """Answer late."""
        time.sleep(_LATENCY_SECONDS)
        super().do_GET()

    def copyfile(self, source: Any, outputfile: Any) -> None:
        """Send the file at the server's rate."""
        began, num_sent = time.perf_counter(), 0
        while piece := source.read(1 << 18):
            outputfile.write(piece)
            num_sent += len(piece)
            time.sleep(max(0.0, began + num_sent / _BYTES_A_SECOND - time.perf_counter()))


class _Server(ThreadingHTTPServer):
    """A server to which a reader that leaves is no error."""

    def handle_error(self, *_: Any) -> None:
        """Print nothing."""


@contextmanager
def served(folder: str) -> Iterator[str]:
    """Serve a folder from a process of its own; yield its address."""
    context = multiprocessing.get_context("spawn")
    port = context.SimpleQueue()
    server = context.Process(target=_serve, args=(folder, port), daemon=True)
    server.start()
    try:
        yield f"http://127.0.0.1:{port.get()}"
    finally:
        server.kill()
        server.join()


def _serve(folder: str, port: Any) -> None:
    server = _Server(("127.0.0.1", 0), partial(_Slow, directory=folder))
    port.put(server.server_address[1])
    server.serve_forever()
