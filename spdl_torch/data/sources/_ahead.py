"""Shards that are there before they are needed."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from ...engine.channel import Channel, ChannelClosed
from ...engine.threads import ThreadGroup

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


def fetched_ahead(urls: Sequence[str], fetch: Callable[[str], object], count: int) -> Iterator[str]:
    """Yield the URLs; from each one on, ``count`` threads fetch the ``count`` that come next.

    What fails is left to whoever reads the shard. Threads end with the iteration, after what they
    are fetching.
    """
    todo = Channel[str](max(1, len(urls)))
    threads = ThreadGroup(todo.close)
    try:
        for number, url in enumerate(urls):
            for each in urls[number + 1 if number == 0 else number + count : number + count + 1]:
                todo.put(each)
            if number == 0:
                run = partial(_fetch_all, todo, fetch)
                threads.spawn_all([("shards", run)] * min(count, len(urls) - 1))
            yield url
    finally:
        todo.close()


def _fetch_all(todo: Channel[str], fetch: Callable[[str], object]) -> None:
    while True:
        try:
            url = todo.get()
        except ChannelClosed:
            return
        with suppress(Exception):
            fetch(url)
