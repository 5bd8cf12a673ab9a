"""Look up a name in a module of SPDL's: another module, a part of this package, or left out."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import spdl_torch.lazy_names as lazy_names

from .left_out import LEFT_OUT

if TYPE_CHECKING:
    from collections.abc import Mapping


def look_up(
    module: str, name: str, *, modules: tuple[str, ...] = (), homes: Mapping[str, str] | None = None
) -> Any:
    """Return what a module's ``__getattr__`` returns.

    modules: its submodules, which are imported.
    homes: as for ``import_name``.
    Raises: AttributeError: there is no such name; for one that is left out on purpose, the message
        says what to use instead.
    """
    if name in modules:
        return importlib.import_module(f".{name}", module)
    hint = LEFT_OUT.get(module, {}).get(name)
    if hint is not None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}. {hint}")
    return lazy_names.import_name(module, homes or {}, name)
