"""A rank's or worker's items of a source that keeps a state of its own."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from ..sampling.parts import Stride, undivided
from .user_state import give_state, keeps_state, state_of

if TYPE_CHECKING:
    from collections.abc import Iterator


def keeping(part: Any) -> Any:
    """Return a part of a source as one that has a state, if its source keeps one."""
    if not isinstance(part, Stride) or not keeps_state(undivided(part)):
        return part
    return _KeepingStride(keeping(part.source), part.part, part.tail)


@dataclass(slots=True)
class _KeepingStride(Stride):
    """A stride whose state is that of the source, and how many items are left of the round. So one
    rank's state serves all.

    ``tail="pad"`` repeats the items that the source has given first since the state.
    """

    num_left: int = 0

    def __iter__(self) -> Iterator[Any]:
        items = iter(self.source)
        for _ in islice(items, self.num_left):
            pass
        self.num_left = 0
        num_left = self.part.count - self.part.index - 1 if self.tail == "uneven" else 0
        for item in self.of(items):
            self.num_left = num_left
            yield item
        self.num_left = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last item."""
        return {"source": state_of(self.source), "num_left": self.num_left}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to a state, before the first item."""
        give_state(self.source, state_dict["source"], "source")
        self.num_left = state_dict["num_left"]
