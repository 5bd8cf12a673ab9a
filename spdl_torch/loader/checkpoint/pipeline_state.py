"""The position in a pass of a PipelineDataset as a state, and how to resume there.

If every stage maps one item to one, or aggregates, and nothing was dropped, the number of items
that the trainer received gives the number of source items: the next pass begins after those. Once
an op has dropped or failed an item it does not: the pass then runs from its beginning, and the
items that were already handed out are thrown away.
"""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from ...engine.ops import OpKind
from ..state_fields import (
    ANYTHING,
    AT_LEAST_ONE,
    DICT,
    FLAG,
    NUMBER,
    OPTIONAL_NUMBER,
    check_fields,
    check_version,
    conditions_of,
    saved,
)
from .made_by import PIPELINE_FIELDS
from .user_state import give_state

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ...engine.definition import StageSpec

_VERSION = 3

_ONE_FOR_ONE = (OpKind.FUNCTION, OpKind.ASYNC_FUNCTION)


@dataclass(frozen=True, kw_only=True, slots=True)
class PassState:
    """The checked contents of a state: its fields are those of the state."""

    epoch: int = saved(NUMBER)
    finished: bool = saved(FLAG)
    """Whether the loop saw the end: the next pass then starts from the beginning."""
    begun: bool = saved(FLAG, default=True)
    """Whether a pass has ever begun."""
    num_items: int = saved(NUMBER, default=0)
    """The number of items handed out on this rank."""
    num_source: int | None = saved(OPTIONAL_NUMBER, default=None)
    """The number of items of this rank's part of the source in those; None = unknown."""
    world: int = saved(AT_LEAST_ONE, default=1)
    source: Any = saved(ANYTHING, default=None)
    """The source's own state, if it keeps one and was asked."""
    num_after: int = saved(NUMBER, default=0)
    """The number of source items since ``source`` was taken."""
    made_by: dict[str, Any] = saved(DICT, default_factory=dict)
    """The source and stages that the state is of; {} = not known."""

    @classmethod
    def checked(cls, state: Mapping[str, Any]) -> PassState:
        """Check a state. Raises: ValueError: not a dataset's state, or of another format."""
        check_version(state, _VERSION, "PipelineDataset")
        values = copy.deepcopy({**state})
        del values["version"]
        conditions = conditions_of(cls)
        check_fields(values, conditions, conditions, "PipelineDataset")
        check_fields(values["made_by"], PIPELINE_FIELDS, (), "PipelineDataset", "made_by.")
        resume = cls(**values)
        if resume.num_after > (resume.num_source or 0):
            raise ValueError("load_state_dict: num_after must be at most num_source.")
        return resume

    def as_dict(self) -> dict[str, Any]:
        """Return the state as numbers alone, apart from the source's own state."""
        return {**asdict(self), "version": _VERSION}  # asdict makes a deep copy

    def rest(self, source: Any, world: int) -> bool:
        """Give the source its own state after the pass, which has finished. Return whether there is
        one. Raises: ValueError: the source keeps none now.
        """
        # It fits only the same number of ranks, as in the middle of a pass.
        is_given = self.source is not None and self.world == world
        if is_given:
            give_state(source, self.source, "source")
        return is_given

    def start_for(self, world: int, *, fixed: bool) -> int:
        """Return how many items of a rank's part to skip. ``fixed``: the source makes the parts,
        so their number must stay. Raises: ValueError: the state does not fit.
        """
        assert self.num_source is not None, "guaranteed by the caller: it replays otherwise"
        if world == self.world:
            return self.num_source
        total, rest = divmod(self.num_source * self.world, world)
        if fixed or rest:
            raise ValueError(
                f"load_state_dict: the state is of {self.world} rank(s), this run has {world}. "
                + (
                    "The source makes each rank's part itself, and the parts are others now."
                    if fixed
                    else f"{self.num_source * self.world} items cannot be shared out among them."
                )
            )
        return total


def items_per_output(stages: Sequence[StageSpec]) -> int | None:
    """Return the number of source items in one item of the last stage; None = it varies."""
    if any(stage.kind not in (*_ONE_FOR_ONE, OpKind.AGGREGATE) for stage in stages):
        return None
    return prod(stage.batch_size for stage in stages if stage.kind is OpKind.AGGREGATE)


def unordered_stage(stages: Sequence[StageSpec]) -> str | None:
    """Return the name of the first stage that may change the order of items, or None."""
    for stage in stages:
        if stage.concurrency > 1 and stage.output_order == "completion":
            return stage.name
    return None
