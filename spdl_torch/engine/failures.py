"""The number of failures that a stage may have, the record of them, and a report's words on the
samples that ``on_error="skip"`` left out.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any

from ..locks import RLock
from ..shown_text import printable, shortened

if TYPE_CHECKING:
    from .definition import MaxFailures

_logger = logging.getLogger("spdl_torch.pipeline")

DEFAULT_MAX_FAILURES = 0.1
_PROBATION_TASKS = 100  # SPDL's value: a share of fewer tasks says little
_KEPT_ERRORS = 20  # of a stage; enough to see a pattern, few enough to keep their frames alive
_LOGGED_ERRORS = 10


class FailureBudget:
    """The failures of one stage, and the limit on them."""

    def __init__(self, stage: str, limit: MaxFailures | None) -> None:
        self._stage = stage
        self._limit: Any = DEFAULT_MAX_FAILURES if limit is None else limit
        if self._limit == -1:
            self._limit = math.inf  # SPDL's word for no limit
        elif isinstance(self._limit, Integral):
            self._limit = int(self._limit)  # numpy's as well
        # Several threads of the stage may fail at once: the lock gives each failure a number of its
        # own, and the judgement as many tasks as there are for it. It is not held while one is
        # logged, for a handler may be slow.
        self._lock = RLock()
        self.num_failures = self._num_tasks = 0
        self.errors: list[Exception] = []

    def spend(self, error: Exception, num_tasks: int) -> bool:
        """Count a failure; True if the budget is now overdrawn. ``num_tasks``: at least those up to
        the one that failed."""
        with self._lock:
            self.num_failures += 1
            count = self.num_failures
            if count <= _KEPT_ERRORS:
                self.errors.append(error)
            self._num_tasks = max(self._num_tasks, num_tasks)
            is_overdrawn = self._exceeded(self._num_tasks)
        self._log(error, count, num_tasks)
        return is_overdrawn

    def overdrawn_at_end(self, num_tasks: int) -> bool:
        """Judge the stage after its last task, and log how many have failed."""
        self._log_total(num_tasks)
        is_share = not isinstance(self._limit, int) and self._limit < 1
        return self._exceeded(num_tasks) or (is_share and 0 < num_tasks <= self.num_failures)

    def message(self, num_tasks: int) -> str:
        """Return the text of the :class:`PipelineFailure`."""
        limit = self._limit if isinstance(self._limit, int) else f"{float(self._limit):.4g} of all"
        return (
            f"stage {self._stage!r}: {self.num_failures} of {num_tasks} tasks failed, "
            f"max_failures is {limit}. Fix the items below or raise max_failures"
        )

    def _log(self, error: Exception, count: int, num_tasks: int) -> None:
        """Log one failure, the ``count``-th. A loader's skipped samples have words of their own."""
        if count <= _LOGGED_ERRORS:
            where, text = (notes_of(error) or ["in a stage"])[-1], shortened(text_of(error), 500)
            _logger.error("%s: %s; the item is dropped.", where, printable(text))

    def _log_total(self, num_tasks: int) -> None:
        """Log the number of failures, after the last task; as ``_log``."""
        if self.num_failures > _LOGGED_ERRORS:
            _logger.error(
                "stage %r: %d of %d items failed and were dropped; the first %d are logged.",
                self._stage,
                self.num_failures,
                num_tasks,
                _LOGGED_ERRORS,
            )

    def _exceeded(self, num_tasks: int) -> bool:
        if isinstance(self._limit, int):
            return self.num_failures > self._limit
        return num_tasks >= _PROBATION_TASKS and self.num_failures > self._limit * num_tasks


def as_exception(error: BaseException) -> Exception:
    """Return ``error``, or an Exception around what cannot be a member of an ExceptionGroup."""
    if isinstance(error, Exception):
        return error
    wrapped = RuntimeError(f"{type(error).__name__} in a thread of the pipeline")
    wrapped.__cause__ = error
    return wrapped


def attach_note(error: BaseException, note: str) -> None:
    """Call ``error.add_note``, past a class that refuses new attributes, as a frozen dataclass
    does, or answers every one. Never raises: the error matters more than its note.
    """
    try:
        error.add_note(note)
    except Exception:
        try:
            vars(error).setdefault("__notes__", []).append(note)
        except Exception:  # the user's own __notes__ are no list
            _logger.warning("%s refuses a note: %s", type(error).__name__, note)


def notes_of(error: BaseException) -> list[str]:
    """Return the notes of an exception, [] where its class answers something else in their place,
    as proxies that answer every attribute do. Never raises.
    """
    try:
        notes: Any = error.__notes__
    except Exception:  # there are none, or the class's own method fails
        return []
    return [str(each) for each in notes] if isinstance(notes, list | tuple) else []


def renew_note(error: BaseException, where: str, note: str) -> None:
    """Attach a note that begins with ``where``, in place of one that is there: user code may raise
    one exception object again and again, and where it was raised before is of no use.
    """
    for number, each in enumerate(notes_of(error)):
        if each == where or each.startswith((f"{where} ", f"{where},", f"{where}\n")):
            vars(error)["__notes__"][number] = note
            return
    attach_note(error, note)


def describe(item: Any) -> str:
    """Describe an item in one short line; arrays and tensors by type and shape, never by values.

    Never raises, even where the item's own ``__repr__`` does: the user's error is being handled
    meanwhile, and must not be replaced by another one.
    """
    try:
        text = _described(item)
    except Exception:
        text = f"{type(item).__name__} object"
    return shortened(text, 200)


def text_of(error: BaseException) -> str:
    """Return the error's type and, unless its ``__str__`` fails, its text."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return f"{type(error).__name__}, whose __str__ fails"


def _described(item: Any) -> str:
    if isinstance(item, str | bytes | int | float | bool | os.PathLike | None):
        return repr(item)
    if (shape := getattr(item, "shape", None)) is not None:
        return f"{type(item).__name__} of shape {tuple(shape)}"
    if isinstance(item, tuple | list):
        if not item:
            return f"empty {type(item).__name__}"
        return f"{type(item).__name__} of {len(item)}: {describe(item[0])}, ..."
    return f"{type(item).__name__} object"


SKIPPED = "skipped"
"""The name of an event: a sample that failed and was left out of its batch."""

MOST_KEPT = 1_000
"""The number of skipped samples that a loader remembers."""

LEFT_OUT = "fetch: samples that were skipped: "
"""The beginning of the remark on them."""

_SHOWN = 5
_MOST_OF_KEY, _MOST_OF_ERROR = 200, 80


def key_text(key: Any) -> str:
    """Return the key of a sample as text; what it is if its ``__str__`` fails."""
    try:
        return str(key)
    except Exception:
        return describe(key)


def remarks_on_left_out(samples: Sequence[tuple[Any, str]], number: int) -> tuple[str, ...]:
    """Return the remark that names the samples that were left out; () = none was.

    samples: the key and the error's text of each that is remembered, the latest last.
    number: how many there were in all.
    """
    if not samples:
        return ()
    shown = [
        f"{shortened(key_text(key), _MOST_OF_KEY)} ({error[:_MOST_OF_ERROR]})"
        for key, error in samples[-_SHOWN:]
    ]
    more = f" and {number - len(shown)} before" if number > len(shown) else ""
    return (f"{LEFT_OUT}{', '.join(shown)}{more}.",)
