"""Iterate over the items of a source, on the thread that asks for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..definition.specs import SourceSpec


def iterate(source: SourceSpec) -> Iterator[Any]:
    """Return an iterator over a plain or an asynchronous source."""
    if isinstance(source.source, AsyncIterable):
        return _iterate_async(source.source)
    return iter(source.source)


def _iterate_async(iterable: AsyncIterable[Any]) -> Iterator[Any]:
    """Iterate over an async source by a loop of its own, which pauses between items."""
    iterator = aiter(iterable)

    async def advance() -> Any:
        return await anext(iterator)

    with asyncio.Runner() as runner:
        while True:
            try:
                item = runner.run(advance())
            except StopAsyncIteration:
                return
            yield item
