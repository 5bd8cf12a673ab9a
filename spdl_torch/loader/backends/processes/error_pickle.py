"""Exceptions between processes: the user's own type, with its notes, cause and traceback.

A traceback cannot be pickled; it becomes a note. An exception that cannot be pickled, or whose
pickle gives another one (its constructor takes other arguments), is sent in parts: its class and
what can be pickled of its arguments and attributes. ``except`` finds it by its class alone.

Causes, and groups inside groups, are sent to a bounded depth: the recursion of pickle is. Of deeper
groups come the errors in them, without the groups around them; ``except*`` finds them there.

Its methods, and those of what it holds, are the user's, and may raise anything: KeyboardInterrupt,
SystemExit. The loop waits for this error, and must not get theirs in its place. So BaseException is
caught around each of them; what cannot be sent for it is named in a note, or sent as text.
"""

from __future__ import annotations

import os
import pickle
import traceback
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ....engine.failures import notes_of, text_of
from ....objects.members import slots_of
from ...error_notes import attributes_of, of_parts, set_attribute
from ..jobs import Failed

if TYPE_CHECKING:
    from typing import Any

    from ..jobs import Result

_OURS = f"{Path(__file__).parents[2]}{os.sep}"  # frames there are of no use to users

_MOST_LEVELS = 8  # of causes and of groups, together
_MOST_TEXT = 500  # characters of an argument that is sent as text


class PackedError(NamedTuple):
    """An exception in the form in which it is sent."""

    content: bytes | None
    """The pickle; None = there is none that gives the same exception."""
    kind: bytes
    """The pickle of its class."""
    text: str
    """The type and the text."""
    notes: tuple[str, ...]
    cause: PackedError | None
    """What it was raised from, or else what was being handled."""
    is_from_cause: bool
    # In place of its pickle:
    args: tuple[bytes, ...] = ()
    attributes: tuple[tuple[str, bytes], ...] = ()
    members: tuple[PackedError, ...] = ()
    """The exceptions of a group."""


def pack_error(error: BaseException, depth: int = 0) -> PackedError:
    """Pack an exception in the process that raised it. Its traceback becomes a note."""
    notes = (*notes_of(error), *_trace_of(error))
    cause = error.__cause__
    before = cause or (None if error.__suppress_context__ else error.__context__)
    packed_cause = pack_error(before, depth + 1) if before and depth < _MOST_LEVELS else None
    chain = packed_cause, cause is not None
    kind, text = _packed_class(type(error)), text_of(error)
    try:
        return PackedError(_pickled(error), kind, text, notes, *chain)
    except BaseException:  # of the exception's own methods
        *parts, left_out = _parts_of(error, depth)
    if left_out:
        notes += (f"without {', '.join(left_out)}, which cannot be pickled",)
    return PackedError(None, kind, text, notes, *chain, *parts)


def unpack_error(packed: PackedError) -> BaseException:
    """Rebuild an exception in the process that will raise it."""
    error: BaseException
    try:
        error = _rebuilt(packed) if packed.content is None else pickle.loads(packed.content)
    except Exception as reason:  # of the exception's own methods
        error = _of_text(packed, reason)
    notes = list(packed.notes)
    if (text := text_of(error)) != packed.text and packed.text not in text:
        notes.insert(0, f"in the worker process it was {packed.text}")
    if notes:
        set_attribute(error, "__notes__", notes)
    if packed.cause is not None:
        name = "__cause__" if packed.is_from_cause else "__context__"
        set_attribute(error, name, unpack_error(packed.cause))
    return error


def with_errors(result: Result, convert: Any) -> Result:
    """Return the result with its errors packed for sending, or rebuilt."""
    if isinstance(result, Failed):
        result = result._replace(error=convert(result.error))
    progress = result.progress
    if progress is not None and progress.failure is not None:
        failure = progress.failure.converted(convert)
        result = result._replace(progress=progress._replace(failure=failure))
    if result.tries is None or not result.tries.bad:
        return result
    bad = tuple(each._replace(error=convert(each.error)) for each in result.tries.bad)
    return result._replace(tries=result.tries._replace(bad=bad))


def _pickled(error: BaseException) -> bytes:
    """Pickle an exception. Raises: what pickle raises; TypeError: it unpickles as another one."""
    if isinstance(error, BaseExceptionGroup):
        raise TypeError("its members are sent one by one")
    if slots_of(error):
        raise TypeError("exceptions are pickled without what is in their slots")
    content = pickle.dumps(error)
    back = pickle.loads(content)
    if type(back) is not type(error) or text_of(back) != text_of(error):
        raise TypeError(f"its pickle gives {text_of(back)}")
    return content


def _parts_of(error: BaseException, depth: int) -> tuple[Any, Any, Any, list[str]]:
    """Return what can be pickled of an exception (its arguments, attributes, and members), and the
    names of what cannot."""
    attributes, left_out = [], []
    for name, value in attributes_of(error):
        try:
            attributes.append((name, _checked(value)))
        except BaseException:
            left_out.append(f"its attribute {name}")
    args: list[bytes] = []
    members: tuple[PackedError, ...] = ()
    given = error.args
    if isinstance(error, BaseExceptionGroup):
        given = (error.message,)
        members = tuple(pack_error(each, depth + 1) for each in error.exceptions)
    for value in given:
        try:
            args.append(_checked(value))
        except BaseException:
            args.append(pickle.dumps(_shown(value)))
    return tuple(args), tuple(attributes), members, left_out


def _checked(value: Any) -> bytes:
    """Pickle a value. Raises: what pickle raises on it, or on its pickle."""
    content = pickle.dumps(value)
    pickle.loads(content)
    return content


def _shown(value: Any) -> str:
    try:
        return repr(value)[:_MOST_TEXT]
    except BaseException:
        return f"{type(value).__name__} object"


def _packed_class(kind: type[BaseException]) -> bytes:
    """Pickle the class or, if it is not found by its name, what finds it by the first of its bases
    that is."""
    for base in kind.__mro__:
        try:
            content = _checked(base)
        except Exception:
            continue  # defined in a function, or in a module that is no longer there
        by_base = partial(_class_named, base, kind.__module__, kind.__qualname__)
        return content if base is kind else pickle.dumps(by_base)
    raise AssertionError("guaranteed by BaseException, which is found by its name")


def _class_of(packed: bytes) -> type[BaseException]:
    found = pickle.loads(packed)
    kind: type[BaseException] = found if isinstance(found, type) else found()
    return kind


def _class_named(base: type[BaseException], module: str, name: str) -> type[BaseException]:
    """Return the class; where this process does not have it, one of its name and its bases."""
    found = [
        kind
        for kind in (base, *_subclasses_of(base))
        if (kind.__module__, kind.__qualname__) == (module, name)
    ]
    if found:
        return found[-1]  # a function that is called again defines another class; this is the last
    names = {"__module__": module, "__qualname__": name}
    return type(name.rpartition(".")[2], (base,), names)


def _subclasses_of(kind: type[BaseException]) -> Iterator[type[BaseException]]:
    for each in type.__subclasses__(kind):
        yield each
        yield from _subclasses_of(each)


def _rebuilt(packed: PackedError) -> BaseException:
    """Rebuild an exception from its parts, without its constructor. Raises: what a part raises."""
    args = tuple(map(pickle.loads, packed.args))
    if packed.members:
        args = (*args, list(map(unpack_error, packed.members)))
    error = of_parts(_class_of(packed.kind), args)
    for name, content in packed.attributes:
        try:
            set_attribute(error, name, pickle.loads(content))
        except Exception:  # of the user's methods
            continue
    return error


def _of_text(packed: PackedError, reason: BaseException) -> BaseException:
    """Return an exception with nothing but its type, if there is that here, and its text."""
    text = f"{packed.text} ({text_of(reason)})"
    try:
        return of_parts(_class_of(packed.kind), (text,))
    except Exception:
        return RuntimeError(text)


def _trace_of(error: BaseException) -> list[str]:
    frames = traceback.extract_tb(error.__traceback__)
    # One object that is raised again has the frames of each time, the last ones first.
    begins = [n for n, each in enumerate(frames) if _place_of(each) == _place_of(frames[0])]
    del frames[begins[1] if len(begins) > 1 else len(frames) :]
    while frames and frames[0].filename.startswith(_OURS):
        del frames[0]
    if not frames:
        return []
    lines = "".join(traceback.format_list(frames)).rstrip()
    return [f"raised in the worker process (pid {os.getpid()})\n{lines}"]


def _place_of(frame: traceback.FrameSummary) -> tuple[str, str]:
    return frame.filename, frame.name
