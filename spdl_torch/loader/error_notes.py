"""The user's own exceptions: notes on them that say where they happened, and what they hold, from
which they are made again in another process.

Constructors may take other arguments than the exceptions keep: they are not called for that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import get_worker_info

from ..engine.failures import attach_note, describe, notes_of, renew_note, text_of
from ..handlers import raised_in_handler
from ..objects.members import slots_of

_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class that is not built in
_SEEN_TO = ("args", "__traceback__", "__context__", "__cause__", "__suppress_context__", "__dict__")


def is_of_handler(error: BaseException) -> bool:
    """Return whether a signal's handler raised an error on the loop's thread, whatever it
    interrupted. In a worker process a handler is the dataset's, and limits the time of a sample,
    say.
    """
    return get_worker_info() is None and raised_in_handler(error)


def is_users(error: BaseException) -> bool:
    """Return whether user code that was called raised it, not Ctrl-C or a signal's handler."""
    return isinstance(error, Exception) and not is_of_handler(error)


def attributes_of(error: BaseException) -> Iterator[tuple[str, Any]]:
    """Yield the attributes: the instance's own, and the fields of built-in classes (errno)."""
    own = {**vars(error), **slots_of(error)}
    yield from ((name, value) for name, value in own.items() if name != "__notes__")
    for kind in type(error).__mro__:
        if kind.__flags__ & _HEAP_TYPE or not issubclass(kind, BaseException):
            continue
        for name in vars(kind):
            if name in _SEEN_TO or name.startswith("__"):
                continue
            value = getattr(error, name, None)
            is_member = name in ("message", "exceptions")  # of a group, and read-only
            if value is not None and not (callable(value) or is_member):  # None: a field not set
                yield name, value


def of_parts(kind: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    """Make an exception without its constructor."""
    built_in = next(base for base in kind.__mro__ if not base.__flags__ & _HEAP_TYPE)
    error: BaseException = built_in.__new__(kind, *args)
    set_attribute(error, "args", args)
    return error


def set_attribute(error: BaseException, name: str, value: Any) -> None:
    """Set an attribute of an exception, past a class that refuses it."""
    try:
        setattr(error, name, value)
    except Exception:  # its class refuses it, as a frozen dataclass does
        BaseException.__setattr__(error, name, value)


def add_thread_note(error: BaseException, where: str, what: str = "") -> None:
    """Add a note to the user's own exception: where it happened, and on which worker."""
    thread = threading.current_thread().name
    note = f"{where} ({thread})" if thread.startswith("spdl-") else where
    renew_note(error, where, f"{note}, {what}" if what else note)


def noted_sample(error: BaseException, index: Any) -> BaseException:
    """Return the error of a map-style dataset's sample, with a note."""
    key = describe(index)
    return noted_call(error, f"dataset[{key}]", "in the dataset", f"sample index {key}")


# These functions return the error instead of raising it: a frame in the error's traceback with a
# variable that holds the error is a cycle, which would keep the dataset alive until a garbage
# collection. (Raise it without `from`, which would hide what the user's code was handling.)


def noted_call(error: BaseException, function: str, where: str, what: str) -> BaseException:
    """Return the error of a user's function that takes a whole batch, with a note. StopIteration,
    which would silently end the trainer's loop early (as it does in torch), becomes a RuntimeError.
    """
    if isinstance(error, StopIteration):
        raised = RuntimeError(
            f"{function} raised StopIteration, which would end the epoch early. A map-style "
            "dataset ends by its length; raise IndexError or another error for a bad index."
        )
        raised.__cause__ = error
        error = raised
    add_thread_note(error, where, what)
    return error


def not_an_end(error: StopIteration) -> RuntimeError:
    """Return the error to raise for a StopIteration of user code, which would silently end the
    trainer's loop early.
    """
    return _instead_of(
        error,
        "DataLoader: user code raised StopIteration, which would end the epoch early. Its "
        "traceback is above; raise another error there.",
    )


def as_raised_in_loop(error: BaseException) -> BaseException:
    """Return a worker's error as the loop gets it: the same, unless it would end the epoch or the
    program without a word. Where ``sys.exit()`` ends a worker of torch's loader, its loop gets a
    RuntimeError, too.
    """
    if isinstance(error, StopIteration):
        return not_an_end(error)
    if isinstance(error, SystemExit):
        return _instead_of(
            error,
            f"DataLoader: user code called sys.exit({error.code!r}) on a worker, where it does not "
            "end the program. Its traceback is above; raise another error there.",
        )
    return error


def _instead_of(error: BaseException, text: str) -> RuntimeError:
    """Return a RuntimeError with the notes of the error, which is its cause."""
    raised = RuntimeError(text)
    for note in notes_of(error):
        attach_note(raised, note)
    raised.__cause__ = error
    return raised


def describe_indices(index: Any) -> str:
    """Describe the indices of a batch in one short line. Never raises: an index may be anything."""
    try:
        text = ", ".join(map(describe, list(index)[:8]))
        return f"indices [{text}{', ...' if len(index) > 8 else ''}]"
    except Exception:  # a slice, say, or a number
        return f"index {index!r}" if isinstance(index, slice) else f"index {describe(index)}"


def describe_batch(number: int, index: Any) -> str:
    """Describe a batch by its number in the epoch and its indices, in one short line."""
    if isinstance(index, list | tuple):
        return f"batch {number}, {describe_indices(index)}"
    return f"batch {number}, sample index {describe(index)}"


class Reason:
    """The reason for a failure: raised first as the user's own error, later as its text.

    An error that was raised refers to the frames of the training loop, perhaps to its iterator: a
    worker thread that kept the error would keep itself alive.
    """

    def __init__(self, error: BaseException) -> None:
        self._error: BaseException | None = error
        self._text = text_of(error)

    def __str__(self) -> str:
        return self._text

    @property
    def is_taken(self) -> bool:
        """Whether the user's own error was taken."""
        return self._error is None

    def converted(self, convert: Callable[[Any], Any]) -> Reason:
        """Return the reason with its error converted, to or from the form sent to a process."""
        reason = Reason.__new__(Reason)
        reason._error = None if self._error is None else convert(self._error)
        reason._text = self._text
        return reason

    def taken(self) -> BaseException:
        """Return the error to raise."""
        error, self._error = self._error, None
        return error or RuntimeError(self._text)
