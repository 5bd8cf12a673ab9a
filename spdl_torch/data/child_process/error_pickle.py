"""Exceptions between processes: the user's own type, with its notes, cause and traceback.

A traceback cannot be pickled; it becomes a note. An exception that cannot be pickled, or not
rebuilt from its pickle, becomes a RuntimeError that names its type and text.
"""

from __future__ import annotations

import os
import pickle
import traceback
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ...pipeline.failures import text_of
from ..workers.jobs import Failed

if TYPE_CHECKING:
    from typing import Any

    from ..workers.jobs import Result

__all__ = ["PackedError", "pack_error", "pack_errors_of", "unpack_error", "unpack_errors_of"]

_OURS = str(Path(__file__).parents[1])  # frames there are of no use to users

_MOST_CAUSES = 8


class PackedError(NamedTuple):
    """An exception in the form in which it is sent."""

    content: bytes | None
    """The pickle; None = it cannot be pickled."""
    text: str
    """The type, the text and why there is no pickle, for the RuntimeError in its place."""
    notes: tuple[str, ...]
    cause: PackedError | None


def pack_error(error: BaseException, depth: int = 0) -> PackedError:
    """Pack an exception in the process that raised it. Its traceback becomes a note."""
    notes = (*getattr(error, "__notes__", ()), *_trace_of(error))
    cause = error.__cause__
    packed_cause = pack_error(cause, depth + 1) if cause and depth < _MOST_CAUSES else None
    text = text_of(error)
    try:
        return PackedError(_pickled(error), text, notes, packed_cause)
    except Exception as reason:
        text += f" (of type {type(error).__module__}.{type(error).__qualname__}, which cannot be "
        text += f"pickled: {type(reason).__name__}: {reason})"
        return PackedError(None, text, notes, packed_cause)


def unpack_error(packed: PackedError) -> BaseException:
    """Rebuild an exception in the process that will raise it."""
    error: BaseException = RuntimeError(packed.text)
    if packed.content is not None:
        try:
            error = pickle.loads(packed.content)
        except Exception as reason:
            error = RuntimeError(f"{packed.text} ({type(reason).__name__}: {reason})")
    if packed.notes:
        error.__notes__ = list(packed.notes)
    if packed.cause is not None:
        error.__cause__ = unpack_error(packed.cause)
    return error


def pack_errors_of(result: Result) -> Result:
    """Return the result with its errors packed for sending."""
    return _with_errors(result, pack_error)


def unpack_errors_of(result: Result) -> Result:
    """Return the result with its errors rebuilt."""
    return _with_errors(result, unpack_error)


def _with_errors(result: Result, convert: Any) -> Result:
    if isinstance(result, Failed):
        result = replace(result, error=convert(result.error))
    progress = result.progress
    if progress is not None and progress.failure is not None:
        failure = progress.failure.converted(convert)
        result = replace(result, progress=replace(progress, failure=failure))
    if result.tries is None or not result.tries.bad:
        return result
    bad = tuple(replace(each, error=convert(each.error)) for each in result.tries.bad)
    return replace(result, tries=replace(result.tries, bad=bad))


def _pickled(error: BaseException) -> bytes:
    """Pickle an exception. Raises: what pickle raises; TypeError: it unpickles as another type."""
    if isinstance(error, BaseExceptionGroup):
        error = error.derive([unpack_error(pack_error(member)) for member in error.exceptions])
    content = pickle.dumps(error)
    back = pickle.loads(content)
    if type(back) is not type(error):
        raise TypeError(f"its pickle gives {type(back).__name__}")
    return content


def _trace_of(error: BaseException) -> list[str]:
    frames = traceback.extract_tb(error.__traceback__)
    while frames and frames[0].filename.startswith(_OURS):
        del frames[0]
    if not frames:
        return []
    lines = "".join(traceback.format_list(frames)).rstrip()
    return [f"raised in the loading process (pid {os.getpid()})\n{lines}"]
