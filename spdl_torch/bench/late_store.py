"""A web server on this machine that responds late, in a process of its own.

``python -m spdl_torch.bench.late_store`` prints its port and serves until its standard input ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["MEAN_SECONDS", "OBJECT_BYTES", "late_store"]

MEAN_SECONDS = 0.02
OBJECT_BYTES = 16 << 10


@contextlib.contextmanager
def late_store() -> Iterator[int]:
    """Serve ``/0``, ``/1``, ...; each number's object of 16 KB comes after 10 to 30 ms.

    Yields: the port, at 127.0.0.1.
    """
    command = [sys.executable, "-m", __name__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdin is not None, "it is a pipe"
        assert server.stdout is not None, "it is a pipe"
        try:
            yield int(server.stdout.readline())
        finally:
            server.stdin.close()


async def _serve() -> None:
    server = await asyncio.start_server(_answer, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    # Then the process ends, without ``async with server``: since Python 3.12 that would wait until
    # the clients close their open connections.
    await asyncio.to_thread(sys.stdin.read)


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer the GETs of one connection, which the client keeps open."""
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
        while True:
            request = await reader.readuntil(b"\r\n\r\n")
            index = int(request.split(b" ", 2)[1][1:])
            share = index * 2654435761 % 1024 / 1023  # spread evenly, in no order
            await asyncio.sleep(MEAN_SECONDS * (0.5 + share))
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % OBJECT_BYTES)
            writer.write(bytes([index % 256]) * OBJECT_BYTES)
            await writer.drain()
    writer.close()


if __name__ == "__main__":
    asyncio.run(_serve())
