"""What pack() or bucket() was asked for: how samples become batches within a budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .grouping import packed
from .sizes import check_budget, pieces_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from .grouping import Grouping
    from .sizes import Oversize, Pieces


@dataclass(frozen=True, slots=True)
class Rule:
    """How samples become batches."""

    who: str
    """The function that was called, for errors."""
    budget: int
    grouping: Grouping
    collate_fn: Callable[[list[Any]], Any]
    oversize: Oversize
    seed: int
    shuffle: bool

    def __post_init__(self) -> None:
        check_budget(self.budget, self.oversize, self.who)

    @property
    def is_packing(self) -> bool:
        """Whether batches are documents end to end, and not padded samples."""
        return self.grouping is packed

    def pieces(self, sizes: NDArray[Any], first_sample: int = 0) -> Pieces:
        """Return the pieces to group; see ``pieces_of``."""
        return pieces_of(sizes, self.budget, self.oversize, self.who, first_sample)
