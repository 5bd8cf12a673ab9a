"""Stores on this machine that behave as those of the network do: http with ranges, and S3.

Both are real servers on the loopback. What comes in between is said with ``store.faults``, one for
each GET of an object to come:

    "ok"      the answer as it is
    "busy"    503, "slow down"
    "drop"    the connection is closed without an answer
    "cut"     half of the answer, then the connection is closed
    "hang"    no answer before the store is closed
    callable  called before the answer is made; what changes at that moment
"""

import contextlib
import gzip
import http.client
import http.server
import json
import select
import threading
from dataclasses import dataclass, field
from typing import ClassVar

IDLE_SECONDS = 0.2
"""A socket that takes nothing for so long is taken for one whose reader reads no further."""

_SIGNATURE = (
    "AWS4-HMAC-SHA256 Credential=key/20200101/us-east-1/s3/aws4_request, "
    "SignedHeaders=host, Signature=none"  # which moto does not verify
)
_SLOW_DOWN = (
    b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
)


@dataclass
class Answer:
    """Status, headers and content; of HEAD, what a GET would have sent."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    content: bytes = b""


class HttpStore(http.server.ThreadingHTTPServer):
    """A web server of ``files``, with ranges and ETags by default."""

    daemon_threads = False  # close() waits for them
    block_on_close = True
    protocol = "http"  # fsspec's, whose options these are
    options: ClassVar[dict] = {}

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = {}
        self.faults = []
        self.faulty = {"GET"}  # the requests that they are for
        self.requests = []  # (method, path, Range header or None)
        self.ranges = self.etags = self.says_length = True
        self.compresses = False
        self.dates = {}  # Last-Modified, by path
        self.says_size_of_ranges = True
        self.num_bytes_sent = 0
        self.reader_waits = threading.Event()  # or the answer was sent to its end
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,))
        self._thread.start()

    @property
    def address(self):
        return f"http://127.0.0.1:{self.server_port}"

    def url(self, name):
        return f"{self.address}/bucket/{name}"

    def put(self, name, content):
        self.files[f"/bucket/{name}"] = content

    def limit_seconds(self, seconds):
        """Options that end a wait for an answer."""
        import aiohttp

        return {"client_kwargs": {"timeout": aiohttp.ClientTimeout(sock_read=seconds)}}

    @property
    def num_gets(self):
        return sum(method == "GET" for method, _, _ in self.requests)

    def close(self):
        self._closing.set()
        self.shutdown()
        self._thread.join()
        self.server_close()

    def answer(self, method, path, headers, body):
        content = self.files.get(path)
        if content is None:
            return Answer(404)
        found = {"ETag": f'"{hash(content):x}"'} if self.etags else {}
        if self.compresses:
            content = gzip.compress(content, 1, mtime=0)
            found["Content-Encoding"] = "gzip"
        if not self.ranges:
            return Answer(200, found, content)
        found["Accept-Ranges"] = "bytes"
        if path in self.dates:
            found["Last-Modified"] = self.dates[path]
        for condition, name in (("If-Match", "ETag"), ("If-Unmodified-Since", "Last-Modified")):
            if headers.get(condition, found.get(name)) != found.get(name):  # dates only grow here
                return Answer(412)
        wanted = headers.get("Range")
        if wanted is None:
            return Answer(200, found, content)
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        part = content[int(first) : int(last) + 1 if last else None]
        if not part:
            return Answer(416, {"Content-Range": f"bytes */{len(content)}"})
        size = len(content) if self.says_size_of_ranges else "*"
        found["Content-Range"] = f"bytes {first}-{int(first) + len(part) - 1}/{size}"
        return Answer(206, found, part)

    def fault_of(self, method, path, headers):
        with self._lock:
            self.requests.append((method, path, headers.get("Range")))
            wanted = method in self.faulty and self.is_object(path)
            return self.faults.pop(0) if wanted and self.faults else "ok"

    def is_object(self, path):
        return True

    def handle_error(self, request, client_address):
        """Clients go away as they like."""

    def send(self, socket, content):
        view = memoryview(content)
        while view and not self._closing.is_set():
            if not select.select([], [socket], [], IDLE_SECONDS)[1]:
                self.reader_waits.set()
                continue
            num_sent = socket.send(view[: 1 << 16])
            view = view[num_sent:]
            with self._lock:
                self.num_bytes_sent += num_sent
        self.reader_waits.set()

    def wait_until_closed(self):
        self._closing.wait()


class S3Store(HttpStore):
    """moto's server, with faults in front of it, and a bucket."""

    protocol = "s3"

    def __init__(self):
        from moto.server import ThreadedMotoServer

        self._moto = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        self._moto.start()
        super().__init__()
        self.options = {  # with credentials that moto takes
            "key": "key-of-ours",
            "secret": "secret-of-ours",
            "endpoint_url": self.address,
            "client_kwargs": {"region_name": "us-east-1"},
        }
        self.put("", b"")

    def close(self):
        super().close()
        self._moto.stop()

    def url(self, name):
        return f"s3://bucket/{name}"

    def put(self, name, content):
        """Past the faults."""
        path = f"/bucket/{name}".rstrip("/")
        answer = self._ask("PUT", path, {"Authorization": _SIGNATURE}, content)
        assert answer.status == 200, answer

    def limit_seconds(self, seconds):
        return {**self.options, "config_kwargs": {"read_timeout": seconds}}

    @contextlib.contextmanager
    def checking_credentials(self):
        """Refuse whoever is not known to moto's IAM, which knows nobody."""
        from moto import settings

        before, settings.INITIAL_NO_AUTH_ACTION_COUNT = settings.INITIAL_NO_AUTH_ACTION_COUNT, 0.0
        try:
            yield
        finally:
            settings.INITIAL_NO_AUTH_ACTION_COUNT = before

    def is_object(self, path):
        return path.partition("?")[0].count("/") == 2 and "list-type" not in path

    def answer(self, method, path, headers, body):
        return self._ask(method, path, headers, body)

    def _ask(self, method, path, headers, body):
        connection = http.client.HTTPConnection(*self._moto.get_host_and_port())
        try:
            connection.request(method, path, body, dict(headers))
            got = connection.getresponse()
            return Answer(got.status, dict(got.getheaders()), got.read())
        finally:
            connection.close()


class HubStore(HttpStore):
    """What Hugging Face's hub says of a dataset, ``owner/name``, and its files."""

    def put(self, name, content):
        self.files[f"/datasets/owner/name/resolve/main/{name}"] = content

    def answer(self, method, path, headers, body):
        bare = path.partition("?")[0]
        if not bare.startswith("/api/datasets/owner/name"):
            return super().answer(method, bare, headers, body)
        found = {"id": "owner/name", "sha": "1" * 40, "siblings": []}
        if "/tree/" in bare:
            found = [
                {"type": "file", "oid": "0" * 40, "size": len(content), "path": name}
                for path, content in self.files.items()
                for name in [path.partition("/resolve/main/")[2]]
            ]
        return Answer(200, {"Content-Type": "application/json"}, json.dumps(found).encode())


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HttpStore

    def do_GET(self):
        store = self.server
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault = store.fault_of(self.command, self.path, self.headers)
        if callable(fault):
            fault()
        if fault == "hang":
            store.wait_until_closed()
        if fault in ("drop", "hang"):
            self.close_connection = True
            return
        if fault == "busy":
            self._send(Answer(503, content=_SLOW_DOWN))
            return
        answer = store.answer(self.command, self.path, self.headers, body)
        self._send(answer, cut=fault == "cut")

    do_HEAD = do_PUT = do_POST = do_GET

    def _send(self, answer, cut=False):
        self.send_response(answer.status)
        left_out = ["connection", "date", "server", "transfer-encoding"]
        if not self.server.says_length:
            left_out.append("content-length")
            self.close_connection = True
        length = {"Content-Length": str(len(answer.content))}  # of HEAD to S3 it has its own
        for name, value in (length | answer.headers).items():
            if name.lower() not in left_out:
                self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            size = len(answer.content) // 2 if cut else len(answer.content)
            self.server.send(self.connection, answer.content[:size])
        self.close_connection = self.close_connection or cut

    def log_message(self, *args):
        pass
