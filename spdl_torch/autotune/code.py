"""Settings as Python code."""

from __future__ import annotations

import keyword
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


def manual_call(
    concurrency: Mapping[str, int],
    buffer_size: Mapping[str, int],
    **others: int | None,
) -> str:
    """Return the call of ``PerfParams.manual`` as code; options that are None are left out."""
    reserved = {"cls", "buffer_size", *others}
    if all(map(_is_plain, concurrency)) and not reserved & concurrency.keys():
        arguments = [f"{name}={n}" for name, n in concurrency.items()]
    else:
        arguments = [repr(dict(concurrency))]
    arguments += [f"{name}={n}" for name, n in others.items() if n is not None]
    arguments += [f"buffer_size={dict(buffer_size)!r}"] if buffer_size else []
    return f"PerfParams.manual({', '.join(arguments)})"


def _is_plain(name: str) -> bool:
    """Return whether a name can be a keyword argument unchanged: Python normalises names, such as
    the letter ª to an a.
    """
    is_allowed = not keyword.iskeyword(name) and name != "__debug__"
    return name.isascii() and name.isidentifier() and is_allowed
