"""What arguments have to be: whole numbers, and times that a thread can wait for."""

from __future__ import annotations

import threading
from numbers import Integral, Real
from typing import Any

from .shown_text import short_repr


def whole(where: str, name: str, value: Any, least: float = 1) -> int:
    """Return a whole number as an int: numpy's are other numbers where they are added, and end
    at 255. Raises: TypeError; ValueError: it is none, or below ``least``."""
    check_whole(where, least=least, **{name: value})
    return int(value)


def check_whole(where: str, /, *, least: float = 1, optional: bool = False, **values: Any) -> None:
    """Refuse a value that is no whole number, or below ``least``. ``optional``: it may be None.

    Raises: TypeError; ValueError, each with the name by which the value was given.
    """
    or_none = " or None" if optional else ""
    for name, value in values.items():
        if optional and value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, Integral):
            given = short_repr(value, 50)
            raise TypeError(f"{where}: {name} must be an int{or_none}, got {given}.")
        if int(value) < least:
            raise ValueError(f"{where}: {name} must be >= {least}{or_none}, got {value}.")


def check_bytes(where: str, max_bytes: object) -> None:
    """Refuse what is neither None nor a number of bytes. Raises: TypeError; ValueError."""
    if max_bytes is None:
        return
    if isinstance(max_bytes, bool) or not isinstance(max_bytes, Real):
        given = short_repr(max_bytes, 50)
        raise TypeError(f"{where}: max_bytes must be a number of bytes or None, got {given}.")
    if not float(max_bytes) >= 1:
        raise ValueError(f"{where}: max_bytes must be >= 1 or None, got {max_bytes}.")


def checked_seconds(what: str, seconds: object) -> float:
    """Return a time that a thread can wait for. Raises: TypeError; ValueError: it is none."""
    if isinstance(seconds, bool) or not isinstance(seconds, Real):
        raise TypeError(f"{what} must be a number of seconds, got {short_repr(seconds, 50)}.")
    if not float(seconds) > 0:
        raise ValueError(f"{what} must be > 0 seconds, got {seconds}.")
    if float(seconds) > threading.TIMEOUT_MAX:
        raise ValueError(f"{what} must be <= {threading.TIMEOUT_MAX:.0e} seconds, got {seconds}.")
    return float(seconds)
