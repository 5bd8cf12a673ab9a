"""The messages between the trainer and the worker process, small, whatever the batch size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..checkpoint.user_state import WorkerState
    from ..rng.keys import StreamKey
    from ..workers.jobs import Result
    from .error_pickle import PackedError


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


class Ask(NamedTuple):
    """To the child, by a pipe of its own: a question. The answer comes back by that pipe."""

    number: int
    """The question's, which its answer has as well."""
    question: str
    """The question: ``at_work`` or ``rows``."""
    argument: Any = None


class Span(NamedTuple):
    """A part of a slab, in bytes."""

    offset: int
    size: int


class Up(NamedTuple):
    """From the child, its first message, with the file of its ``CountsPage``: signals to the
    trainer's group no longer end it."""


class Answer(NamedTuple):
    """From the child: the result of a job, whose batch is a ``Packed``."""

    epoch: int
    result: Result
    retired: tuple[int, ...]
    """The slabs that will not be used again, because they were too small."""
    done_ns: int
    """When the child sent it, by ``perf_counter_ns``, which is one clock for all processes."""


class LogLine(NamedTuple):
    """From the child: a record of one of our loggers."""

    logger: str
    level: int
    text: str


class Fatal(NamedTuple):
    """From the child, its last message: why it cannot go on."""

    what: str
    error: PackedError
