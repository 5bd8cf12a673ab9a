"""Every exception class of the package; each says who caused it.

An exception raised by the user's own code (a dataset, a stage's function, a collate function)
is never replaced by one of these: it reaches the caller as the same object with a note, alone or,
for a pipeline that ran past its failure budget, inside a :class:`PipelineFailure`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from .shown_text import printable

_IN_THE_MESSAGE = "what was raised in another process stands in the message of the group"


class DecodeError(ValueError, OSError):
    """The data's fault: bytes that cannot be decoded.

    It is an OSError, too, as Pillow's errors are, so that code which leaves out the files that
    Pillow cannot read leaves these out. Its ``errno`` is None; nothing tries to read again.

    The message names the file (or ``<bytes>``) and the codec's reason; ``__cause__`` is the
    codec's own error when it raised one. Characters of either that control a terminal are shown
    as ``\\x1b``.
    """

    def __init__(self, *args: object) -> None:
        shown = (printable(each) if isinstance(each, str) else each for each in args)
        super().__init__(*shown)


class PipelineFailure(ExceptionGroup[Exception]):
    """A stage failed too often, or the source raised.

    The members are the user's own exceptions, each with a note that names the stage and the item;
    one that is not an Exception (SystemExit) is the cause of a RuntimeError in its place. From a
    worker process of torch's own DataLoader only their text comes, as the message, with a
    RuntimeError as the one member.
    """

    def __new__(cls, message: str, exceptions: Sequence[Exception] | None = None) -> Self:
        """Make the group. ``exceptions``: None = they are text in the message, as where torch makes
        the error of one of its worker processes again, which has to be of this class, too.
        """
        return super().__new__(cls, message, exceptions or [RuntimeError(_IN_THE_MESSAGE)])

    def __init__(self, message: str, exceptions: Sequence[Exception] | None = None) -> None:
        super().__init__(message, self.exceptions)

    def derive(self, excs: Sequence[Any], /) -> Any:
        """Keep the class when ``split``, ``subgroup`` or ``except*`` take the group apart."""
        return PipelineFailure(self.message, excs)


class PipelineStopped(RuntimeError):
    """The caller's fault: an item was asked of a pipeline that was already stopped."""


class SourceChangedError(OSError):
    """The store's fault: a file or object was replaced while it was being read.

    The message names it and what changed. Nothing of the new version was returned.
    """


class UnsupportedOptionError(ValueError):
    """The caller's fault: an option that this release cannot honour; the message says what to do
    instead."""
