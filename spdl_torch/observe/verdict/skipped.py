"""A report's words on the samples that ``on_error="skip"`` left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...engine.failures import describe
from ...shown_text import shortened

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
