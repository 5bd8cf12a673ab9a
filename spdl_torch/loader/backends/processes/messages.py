"""The messages between the trainer and the worker process, small, whatever the batch size."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any, NamedTuple

from ..jobs import Loaded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...checkpoint.user_state import WorkerState
    from ...rng.keys import StreamKey
    from ..jobs import Result
    from .error_pickle import PackedError

Span = tuple[int, int]
"""A part of a slab: the place of its first byte, and the number of bytes."""


class Free(NamedTuple):
    """To the child: no tensor in the trainer views these slabs any more."""

    slabs: tuple[int, ...]
    """The slabs that may be written again."""
    spent: tuple[int, ...]
    """The slabs that may not: views in a forked process may have outlived the trainer's."""


class Restart(NamedTuple):
    """To the child: begin another epoch, and drop outstanding jobs."""

    epoch: int
    key: StreamKey
    workers: Sequence[WorkerState]


class Packed(NamedTuple):
    """A batch in the form in which it is sent."""

    slab: int | None
    """The number of its slab; None = it needs none."""
    size: int
    """The slab's size if the trainer has yet to map it, whose file comes with the message; or 0."""
    body: bytes | Span
    """The pickle, or where it lies in the slab."""
    blocks: tuple[Span, ...]
    """The spans of the large tensors and arrays, in the pickle's order."""


class Answer(NamedTuple):
    """From the child: the result of a job, whose batch is a ``Packed``."""

    epoch: int
    result: Result
    retired: tuple[int, ...]
    """The slabs that will not be used again, because they were too small."""
    done_ns: int
    """When the child sent it, by ``perf_counter_ns``, which is one clock for all processes."""


def content_of(answer: Answer) -> bytes:
    """Return the pickle of an answer. That of a batch alone has plain tuples: to find a class takes
    the loop's thread as long as all the rest."""
    result = answer.result
    if type(result) is not Loaded or result.progress is not None or result.tries is not None:
        return pickle.dumps(answer, 5)
    plain = answer.epoch, result.number, tuple(result.batch), answer.retired, answer.done_ns
    return pickle.dumps(plain, 5)


def message_of(content: Any) -> Any:
    """Return the message of a pickle. Raises: what a class in it raises when rebuilt."""
    message = pickle.loads(content)
    if type(message) is not tuple:
        return message
    epoch, number, packed, retired, done_ns = message
    return Answer(epoch, Loaded(number, Packed(*packed)), retired, done_ns)


class LogLine(NamedTuple):
    """From the child: a record of one of our loggers."""

    logger: str
    level: int
    text: str


class Fatal(NamedTuple):
    """From the child, its last message: why it cannot go on."""

    what: str
    error: PackedError
