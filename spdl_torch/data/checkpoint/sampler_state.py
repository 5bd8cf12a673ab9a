"""What a state has of a sampler that keeps its own."""

from __future__ import annotations

from typing import Any

from ...named_tuples import NamedTuple


class SamplerState(NamedTuple):
    """The state of a sampler, after the indices that were drawn from it."""

    state: Any = None
    """None = it keeps none."""
    pending: tuple[Any, ...] = ()
    """The indices that were drawn and not handed out."""
    ended: bool = False
    """Whether those are the last ones of the epoch."""
