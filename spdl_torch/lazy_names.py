"""Public names that a package imports when they are first used."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from .late_imports import collected_later

if TYPE_CHECKING:
    from collections.abc import Mapping


def import_name(package: str, homes: Mapping[str, str], name: str) -> Any:
    """Import a package's public name from its home, and leave it in the package, whose
    ``__getattr__`` calls this: later uses do not come here.

    homes: relative names of the modules, by the public names.
    Raises: AttributeError: it has no home, as for any other module.
    """
    if name not in homes:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    with collected_later():
        value = getattr(importlib.import_module(homes[name], package), name)
    setattr(sys.modules[package], name, value)
    return value
