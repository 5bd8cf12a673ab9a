"""An S3 server on this machine that responds late: moto's, in a process of its own.

``python -m spdl_torch.bench.late_s3 N`` makes N objects, prints its port and serves until its
standard input ends.
"""

from __future__ import annotations

import contextlib
import importlib
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["MEAN_SECONDS", "OBJECT_BYTES", "late_s3", "storage_options"]

MEAN_SECONDS = 0.1
OBJECT_BYTES = 16 << 10
_BUCKET = "bucket"


@contextlib.contextmanager
def late_s3(num_objects: int) -> Iterator[int]:
    """Serve ``s3://bucket/0``, ``s3://bucket/1``, ...; each object of 16 KB comes after 50 to
    150 ms.

    Yields: the port, at 127.0.0.1.
    """
    command = [sys.executable, "-m", __name__, str(num_objects)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdin is not None, "it is a pipe"
        assert server.stdout is not None, "it is a pipe"
        try:
            yield int(server.stdout.readline())
        finally:
            server.stdin.close()


def storage_options(port: int) -> dict[str, Any]:
    """Return fsspec's options for the server, with credentials that moto takes."""
    return {
        "key": "key",
        "secret": "secret",
        "endpoint_url": f"http://127.0.0.1:{port}",
        "client_kwargs": {"region_name": "us-east-1"},
    }


class _Late:
    """moto's application, which responds late to a GET of an object."""

    def __init__(self, application: Callable[..., Any]) -> None:
        self._application = application

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        name = environ["PATH_INFO"].rpartition("/")[2]
        if environ["REQUEST_METHOD"] == "GET" and name.isdigit():
            share = int(name) * 2654435761 % 1024 / 1023  # spread evenly, in no order
            time.sleep(MEAN_SECONDS * (0.5 + share))
        return self._application(environ, start_response)


def _serve(num_objects: int) -> None:
    moto = importlib.import_module("moto.moto_server.werkzeug_app")
    serving = importlib.import_module("werkzeug.serving")
    application = moto.DomainDispatcherApplication(moto.create_backend_app)

    class Quiet(serving.WSGIRequestHandler):  # type: ignore[misc, name-defined]  # untyped here
        protocol_version = "HTTP/1.1"  # which keeps connections open

        def log_request(self, *_: object) -> None:
            pass

    server = serving.make_server(
        "127.0.0.1", 0, _Late(application), threaded=True, request_handler=Quiet
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    backend = importlib.import_module("moto.s3.models").s3_backends["123456789012"]["aws"]
    backend.create_bucket(_BUCKET, "us-east-1")
    for number in range(num_objects):
        backend.put_object(_BUCKET, str(number), bytes([number % 256]) * OBJECT_BYTES)
    print(server.server_port, flush=True)
    sys.stdin.read()
    server.shutdown()


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
