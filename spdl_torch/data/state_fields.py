"""What all saved states have in common: a version, and fields that are checked before any is used.

A state comes out of a file. What does not fit is refused by the name of its field, before anything
of the loader has changed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ..pipeline.failures import describe

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

__all__ = ["Field", "check_fields", "check_version", "is_flag", "is_whole_number"]

_MOST = 2**63 - 1  # of a number that a generator can be seeded with


class Field(NamedTuple):
    """What a field may hold."""

    what: str
    """In words."""
    fits: Callable[[Any], bool]


def is_whole_number(value: Any, least: int = 0) -> bool:
    """Of 64 bits; a bool is none."""
    return type(value) is int and least <= value <= _MOST


def is_flag(value: Any) -> bool:
    """True or false, and no number that counts as such."""
    return isinstance(value, bool)


def check_version(state: Mapping[str, Any], latest: int, owner: str) -> None:
    """Raises: ValueError: not a state of ``owner``, or of a newer release than this one."""
    version = state.get("version") if isinstance(state, dict) else None
    if not is_whole_number(version, 1):
        got = f"{type(state).__name__} without a version"
        if isinstance(state, dict) and "version" in state:
            got = f"version {describe(version)}"
        raise ValueError(
            f"load_state_dict: expected what {owner}.state_dict() returned, got {got}."
        )
    assert version is not None, "guaranteed by the check above"
    if version > latest:
        raise ValueError(
            f"load_state_dict: the state has version {version}, this release knows up to "
            f"{latest}. Upgrade spdl_torch to load it."
        )


def check_fields(
    state: Mapping[str, Any],
    fields: Mapping[str, Field],
    required: Collection[str],
    owner: str,
    where: str = "",
) -> None:
    """Raises: ValueError: it names the field that is missing, unknown or holds something else.

    ``where``: goes before the names, for a state inside a state.
    """
    for name in required:
        if name not in state:
            raise ValueError(
                f"load_state_dict: {where}{name} is missing, so this is no state of a {owner}."
            )
    for name, value in state.items():
        field = fields.get(name)
        if field is None:
            raise ValueError(
                f"load_state_dict: {where}{name} is unknown, so this is no state of a {owner}."
            )
        if not field.fits(value):
            raise ValueError(
                f"load_state_dict: {where}{name} must be {field.what}, got {describe(value)}. "
                f"This is no state of a {owner}."
            )
