"""What all saved states share: a version, and the names of their fields, which are checked before
anything in the loader has changed."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any

from ..engine.failures import describe


def check_version(state: Mapping[str, Any], latest: int, owner: str) -> None:
    """Check a state's version. Raises: ValueError: not ``owner``'s, or of another format."""
    version = state.get("version") if isinstance(state, dict) else None
    if type(version) is not int or version < 1:
        got = f"{type(state).__name__} without a version"
        if isinstance(state, dict) and "version" in state:
            got = f"version {describe(version)}"
        raise ValueError(
            f"load_state_dict: expected what {owner}.state_dict() returned, got {got}."
        )
    if version != latest:
        remedy = "Upgrade spdl_torch" if version > latest else "Begin an epoch without the state"
        raise ValueError(
            f"load_state_dict: the state has version {version}, whose format this release does not "
            f"read: {owner} knows version {latest} alone. {remedy}."
        )


def check_fields(state: Mapping[str, Any], names: Collection[str], owner: str) -> None:
    """Check that a state has these fields. Raises: ValueError, which names one that is missing or
    unknown."""
    for name in state.keys() ^ set(names):
        what = "unknown" if name in state else "missing"
        raise ValueError(f"load_state_dict: {name} is {what}, so this is not a state of a {owner}.")


def checked_values(
    names: Collection[str], state: Mapping[str, Any], latest: int, owner: str
) -> dict[str, Any]:
    """Return a copy of a state's values, beside its version: it has to have these.
    Raises: as ``check_version`` and ``check_fields``."""
    check_version(state, latest, owner)
    check_fields(state, ["version", *names], owner)
    return copy.deepcopy({name: state[name] for name in names})
