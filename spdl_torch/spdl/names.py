"""Look up a name in a module of SPDL's: another module, a part of this package, or left out."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import spdl_torch.lazy_names as lazy_names

if TYPE_CHECKING:
    from collections.abc import Mapping


def look_up(
    module: str, name: str, *, modules: tuple[str, ...] = (), homes: Mapping[str, str] | None = None
) -> Any:
    """Return what a module's ``__getattr__`` returns.

    modules: its submodules, which are imported.
    homes: as for ``import_name``.
    Raises: AttributeError, ImportError: as ``import_name``.
    """
    if name in modules:
        return importlib.import_module(f".{name}", module)
    return lazy_names.import_name(module, homes or {}, name)
