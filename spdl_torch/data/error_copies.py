"""Copies of exceptions: of the same type, with what they hold, without their frames.

Their constructors may take other arguments than they keep, and are not called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..engine.failures import notes_of, text_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class that is not built in
_SEEN_TO = ("args", "__traceback__", "__context__", "__cause__", "__suppress_context__", "__dict__")


def copy_of(error: BaseException) -> BaseException:
    """Return an exception of the same type, text, cause and notes that no frame refers to.

    One that cannot be made becomes a RuntimeError with its type and text.
    """
    try:
        copy = of_parts(type(error), error.args)
        for name, value in attributes_of(error):
            set_attribute(copy, name, value)
        is_equal = text_of(copy) == text_of(error)
    except Exception:  # of the exception's own methods
        is_equal = False
    if not is_equal:
        copy = RuntimeError(text_of(error))
    if notes := notes_of(error):
        set_attribute(copy, "__notes__", notes)
    set_attribute(copy, "__cause__", error.__cause__)
    return copy


def attributes_of(error: BaseException) -> Iterator[tuple[str, Any]]:
    """Yield the attributes: the instance's own, and the fields of built-in classes (errno)."""
    yield from ((name, value) for name, value in vars(error).items() if name != "__notes__")
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
