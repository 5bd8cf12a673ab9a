"""Public names that a package imports when they are first used."""

from __future__ import annotations

import importlib
import opcode
import sys
from typing import TYPE_CHECKING, Any

from .late_imports import collected_later
from .left_out import LEFT_OUT

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import FrameType

_IMPORT_FROM = opcode.opmap["IMPORT_FROM"]
_SPDL = "spdl_torch.spdl.names"  # whose look_up() comes between


def import_name(package: str, homes: Mapping[str, str], name: str) -> Any:
    """Import a package's public name from its home, and leave it in the package, whose
    ``__getattr__`` calls this: later uses do not come here.

    homes: relative names of the modules, by the public names.
    Raises:
        AttributeError: it has no home, as for any other module. For a name that is left out on
            purpose, the message says what to use instead.
        ImportError: the same, where ``from package import name`` asks for a name that is left out:
            Python would drop an AttributeError and its message.
    """
    if name not in homes:
        text = f"module {package!r} has no attribute {name!r}"
        hint = LEFT_OUT.get(package, {}).get(name)
        if hint is None:
            raise AttributeError(text)
        if _imports_from(_caller_of(package)):
            raise ImportError(f"cannot import name {name!r} from {package!r}. {hint}", name=package)
        raise AttributeError(f"{text}. {hint}")
    with collected_later():
        value = getattr(importlib.import_module(homes[name], package), name)
    setattr(sys.modules[package], name, value)
    return value


def _caller_of(package: str) -> FrameType | None:
    """The first frame outside of this file and of the package's ``__getattr__``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") in (__name__, package, _SPDL):
        frame = frame.f_back
    return frame


def _imports_from(frame: FrameType | None) -> bool:
    """Whether a frame is at ``from ... import``: its own instruction, or the machinery's for it."""
    if frame is None:
        return False
    if frame.f_code.co_filename.startswith("<frozen importlib"):
        return frame.f_code.co_name == "_handle_fromlist"
    return frame.f_code.co_code[frame.f_lasti] == _IMPORT_FROM
