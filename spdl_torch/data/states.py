"""What all saved states have in common: a version."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["check_version"]


def check_version(state: Mapping[str, Any], latest: int, owner: str) -> None:
    """Raises: ValueError: not a state of ``owner``, or of a newer release than this one."""
    version = state.get("version") if isinstance(state, dict) else None
    if not isinstance(version, int):
        raise ValueError(
            f"load_state_dict: expected what {owner}.state_dict() returned, got "
            f"{type(state).__name__} without a version."
        )
    if version > latest:
        raise ValueError(
            f"load_state_dict: the state has version {version}, this release knows up to "
            f"{latest}. Upgrade spdl_torch to load it."
        )
