"""The parts that all saved states share: a version, and fields that are checked before use.

A state comes from a file. A field that does not fit is refused by name, before anything in the
loader has changed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from dataclasses import field, fields
from typing import Any, NamedTuple

from ..engine.failures import describe

_MOST = 2**63 - 1  # the largest seed that a generator takes


class Field(NamedTuple):
    """The condition that a field's value has to meet."""

    what: str
    """The condition in words."""
    fits: Callable[[Any], bool]


def is_whole_number(value: Any, least: int = 0) -> bool:
    """Return whether this is an int of 64 bits that is at least ``least``, and not a bool."""
    return type(value) is int and least <= value <= _MOST


def is_flag(value: Any) -> bool:
    """Return whether this is a bool, and not a number that counts as one."""
    return isinstance(value, bool)


NUMBER = Field("a whole number >= 0 of 64 bits", is_whole_number)
OPTIONAL_NUMBER = Field(
    "a whole number >= 0 or null", lambda value: value is None or is_whole_number(value)
)
AT_LEAST_ONE = Field("a whole number >= 1", lambda value: is_whole_number(value, 1))
FLAG = Field("true or false", is_flag)
ANYTHING = Field("anything", lambda _: True)
DICT = Field("a dict", lambda value: isinstance(value, dict))


def list_of(what: str, fits: Callable[[Any], bool] = ANYTHING.fits) -> Field:
    """Return the condition of a list, or of a tuple, all of whose elements meet another."""
    return Field(
        f"a list of {what}",
        lambda value: isinstance(value, list | tuple) and all(map(fits, value)),
    )


def saved(condition: Field, **default: Any) -> Any:
    """Return a field of a dataclass that is a field of the state, with the same name. ``default``:
    as for ``dataclasses.field``."""
    return field(**default, metadata={"condition": condition})


def check_version(state: Mapping[str, Any], latest: int, owner: str) -> None:
    """Check a state's version. Raises: ValueError: not ``owner``'s, or of another format."""
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
    if version < latest:
        raise ValueError(
            f"load_state_dict: the state has version {version}, whose format this release no "
            f"longer reads: {owner} knows version {latest} alone. Begin an epoch without the state."
        )


def check_fields(
    state: Mapping[str, Any],
    fields: Mapping[str, Field],
    required: Collection[str],
    owner: str,
    where: str = "",
) -> None:
    """Check a state's fields. ``where`` goes before the names, for a state inside a state.

    Raises: ValueError, which names the field that is missing, unknown or of the wrong kind.
    """
    for name in required:
        if name not in state:
            raise ValueError(
                f"load_state_dict: {where}{name} is missing, so this is not a state of a {owner}."
            )
    for name, value in state.items():
        field = fields.get(name)
        if field is None:
            raise ValueError(
                f"load_state_dict: {where}{name} is unknown, so this is not a state of a {owner}."
            )
        if not field.fits(value):
            raise ValueError(
                f"load_state_dict: {where}{name} must be {field.what}, got {describe(value)}. "
                f"This is not a state of a {owner}."
            )


def checked_values(
    kind: Any, state: Mapping[str, Any], latest: int, owner: str, made_by: Mapping[str, Field]
) -> dict[str, Any]:
    """Return the values of a state for a dataclass whose fields are ``saved``, and whose field
    ``made_by`` has fields of its own. Raises: as ``check_version`` and ``check_fields``."""
    check_version(state, latest, owner)
    values = copy.deepcopy({**state})
    del values["version"]
    conditions = {each.name: each.metadata["condition"] for each in fields(kind)}
    check_fields(values, conditions, conditions, owner)
    check_fields(values["made_by"], made_by, (), owner, "made_by.")
    return values
