"""Shards that are there before they are needed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from ...engine.channel import Channel, ChannelClosed
from ...engine.threads import ThreadGroup

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


Fetch = Callable[[str, Callable[[], bool]], object]


def fetched_ahead(urls: Sequence[str], fetch: Fetch, count: int) -> Iterator[str]:
    """Yield the URLs; from each one on, ``count`` threads fetch the ``count`` that come next.

    ``fetch`` gets one, and what says whether it may stop: the iteration has ended. What fails is
    left to whoever reads the shard.
    """
    todo, coming = Channel[str](max(1, len(urls))), iter(urls[1:])
    threads = ThreadGroup(todo.close)
    try:
        if (num_threads := min(count, len(urls) - 1)) > 0:
            run = partial(_fetch_all, todo, fetch)
            threads.spawn_all([("shards", run)] * num_threads)
        for each in islice(coming, count - 1):
            todo.put(each)
        for url in urls:
            for each in islice(coming, 1):
                todo.put(each)
            yield url
    finally:
        todo.close()


def _fetch_all(todo: Channel[str], fetch: Fetch) -> None:
    while True:
        try:
            url = todo.get()
        except ChannelClosed:
            return
        with suppress(Exception):
            fetch(url, lambda: todo.closed)
