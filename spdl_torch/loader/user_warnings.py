"""Warn at the line of the user's code that is running."""

from __future__ import annotations

import sys
import warnings
from typing import Any

# Loaders are also built for the user: by our own commands, by torch's generic classes and by
# trainers, from the attributes of the user's own loader.
_NOT_THE_USERS = frozenset(
    ("spdl_torch", "torch", "lightning", "pytorch_lightning", "accelerate", "transformers")
)

_warned: set[str] = set()


def warn_once(text: str) -> None:
    """Warn at the line of the user's code that is running; each text once per process."""
    if text not in _warned:
        warnings.warn(text, stacklevel=_users_level())
        _warned.add(text)


def warn(text: str) -> None:
    """Warn at the line of the user's code that is running."""
    warnings.warn(text, stacklevel=_users_level())


def _users_level() -> int:
    """Return ``stacklevel`` for ``warnings.warn`` in the caller: the first level of user code."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and _package(frame) in _NOT_THE_USERS:
        frame, level = frame.f_back, level + 1
    return level


def _package(frame: Any) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
