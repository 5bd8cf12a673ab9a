"""Who gives each rank its own part of the data already."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DistributedSampler

_MOST_WRAPPERS = 8


def is_shared_out(source: Any) -> bool:
    """Return whether each rank already has its own part: a DistributedSampler, one of
    ``spdl_torch.spdl.source``, or a wrapper of one, such as a batch sampler or a loader.
    """
    for _ in range(_MOST_WRAPPERS):  # an object with any attribute name would never end
        if source is None or _is_one_ranks(source):
            break
        inner = (getattr(source, name, None) for name in ("batch_sampler", "sampler", "_items"))
        source = next((part for part in inner if part is not None), None)
    return _is_one_ranks(source)


def divides_itself(dataset: object) -> bool:
    """Return whether the dataset gives each rank its own part: a ``PipelineDataset``.

    Its class says so, and is not asked for by name: its module brings the engine, which most
    loaders do not need. The class is asked, as an object may answer to any attribute name.
    """
    return getattr(type(dataset), "_divides_itself", False) is True


def deals_in_turn(source: object) -> bool:
    """Return whether part ``r`` of ``n`` that the source makes is every ``n``-th item, from item
    ``r`` on: how far all ranks have come then says where any other number of them goes on.
    """
    return getattr(type(source), "_deals_in_turn", False) is True


def _is_one_ranks(source: Any) -> bool:
    if isinstance(source, DistributedSampler):
        return True
    return getattr(source, "is_shared_out", False) is True
