"""Marks, which pass through channels beside items: the end of an epoch, the lack of an item."""

from __future__ import annotations

from typing import Any, Final

__all__ = ["ABSENT", "END_OF_DATA", "EPOCH_END", "SKIPPED", "Mark", "is_eof", "is_epoch_end"]


class Mark:
    """No item: no op is called with it and no figure counts it, but it takes room as items do."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return f"<{self._name}>"


SKIPPED: Final = Mark("skipped")
"""Takes the place, in the order, of an item that was dropped; never leaves a channel."""

EPOCH_END: Final = Mark("end of the epoch")
"""Stands in a channel between two epochs of a continuous source."""

ABSENT: Final = Mark("absent")
"""Takes the place of a part of a batch: no element went this way, or the path dropped them all."""

END_OF_DATA: Final = Mark("end of the data")
"""Given to a merge op of the user's where a queue has ended."""


def is_eof(item: Any) -> bool:
    """Whether a merge op was given the end of a queue instead of an item."""
    return item is END_OF_DATA


def is_epoch_end(item: Any) -> bool:
    """Whether a merge op was given the end of an epoch instead of an item."""
    return item is EPOCH_END
