"""What passes between the trainer and the loading process; small, whatever the size of a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..checkpoint.resume_state import WorkerState
    from ..rng.keys import StreamKey
    from ..workers.jobs import Result
    from .error_pickle import PackedError

__all__ = ["Answer", "Ask", "Fatal", "Free", "LogLine", "Reply", "Restart", "Span", "Submit", "Up"]


class Free(NamedTuple):
    """To the child: no tensor of the trainer views these slabs any more."""

    slabs: tuple[int, ...]
    """They may be written again."""
    spent: tuple[int, ...]
    """These may not: the views of a forked process may have outlived the trainer's."""


class Submit(NamedTuple):
    """To the child: make a batch. The fields are ``WorkerPool.submit``'s."""

    number: int
    index: Any
    worker: int
    first: int
    wants_state: bool
    freed: Free


class Restart(NamedTuple):
    """To the child: begin another epoch; what is outstanding is dropped."""

    epoch: int
    key: StreamKey
    workers: Sequence[WorkerState]


class Ask(NamedTuple):
    """To the child: what do you say to this? A ``Reply`` follows."""

    question: str
    """``at_work`` or ``timeline``."""
    argument: Any = None


class Span(NamedTuple):
    """A part of a slab, in bytes."""

    offset: int
    size: int


class Up(NamedTuple):
    """From the child, its first word: from now on no signal of the trainer's group ends it."""


class Answer(NamedTuple):
    """From the child: what came of a job. A batch is a ``Packed`` here."""

    epoch: int
    result: Result
    retired: tuple[int, ...]
    """Slabs that will not be used again, because they were too small."""
    readings: bytes | None
    """The pickle of a ``Readings``, opened when somebody asks; None = as told last."""


class Reply(NamedTuple):
    """From the child."""

    question: str
    value: Any


class LogLine(NamedTuple):
    """From the child: what one of our loggers said there."""

    logger: str
    level: int
    text: str


class Fatal(NamedTuple):
    """From the child, its last word: why it cannot go on."""

    what: str
    error: PackedError
