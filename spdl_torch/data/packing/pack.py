"""The functions that group the samples of a dataset by a budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ...checks import check_whole, whole
from ...loader.sampling.parts import OwnRank
from ..sources._stream import is_map_style
from .collate import PackCollate, pad_collate
from .dataset import GroupedDataset, GroupPlan
from .rule import Rule
from .stream import GroupedStream

if TYPE_CHECKING:
    from .rule import Oversize, Size, SizeOf

_LOOK_AHEAD = 4096


def pack(
    dataset: Any,
    budget: int,
    *,
    size_of: SizeOf | Callable[[Any], int],
    pad: float | Mapping[str, float] | None = None,
    oversize: Oversize = "error",
    seed: int = 0,
    shuffle: bool = True,
    look_ahead: int | None = None,
    num_replicas: int | None = None,
    rank: int | None = None,
) -> GroupedDataset | GroupedStream:
    """Return a dataset whose samples are packs: documents end to end, up to ``budget`` tokens.

    A document is a sequence of tokens, or a dict of sequences of equal length: tensors, arrays or
    lists, (T,) or (T, ...). A sequence alone is named ``input_ids``. A pack is a dict of these,
    and of:

    * ``position_ids``: int64 (T,), from 0 in each document;
    * without ``pad``: ``cu_seqlens``, int32 (documents + 1,), where documents begin and the last
      one ends, and ``max_seqlen``, an int, as attention kernels for sequences of varying length
      take them. Load it with ``batch_size=None``;
    * with ``pad``: ``document_ids``, int32 (budget,), the number of each token's document, where
      padding counts as one more document. Every tensor has ``budget`` tokens, so packs can be
      batched.

    Args:
        dataset: map-style, a list of ``spdl_torch.data.sources`` among them; or a stream, which is
            any iterable that can be read again: another source, a function that returns an
            iterator, an iterable dataset that gives all ranks the same items.
        budget: the most tokens of a pack.
        size_of: for a map-style dataset, the sizes of its samples: a list, array or tensor of ints,
            or a function of the index, which is called once for each. Of a mixture, a function of
            the position, which is called for each of every epoch; a list has the first epoch alone.
            For a stream, a function of the item.
        pad: the value after the last document, or one for each field, 0 for those not named; None =
            no padding.
        oversize: ``"error"``: a document of more than ``budget`` tokens is refused. ``"split"``: it
            is divided into pieces of ``budget`` tokens, the last one with the rest.
        seed, shuffle: the order of documents and packs; False = nothing is shuffled.
        look_ahead: for a stream, the number of items that are packed together; None = 4096.
        num_replicas, rank: for a stream, in place of torch.distributed's. For a map-style dataset,
            pass them to ``sampler()``.

    Raises: TypeError, ValueError: see the message.
    """
    budget, seed = whole("pack", "budget", budget), whole("pack", "seed", seed, -math.inf)
    rule = Rule("pack", budget, PackCollate(budget, pad), oversize, seed, shuffle)
    return _grouped(rule, dataset, size_of, look_ahead, num_replicas, rank)


def bucket(
    dataset: Any,
    budget: int,
    *,
    size_of: SizeOf | Callable[[Any], Size],
    collate_fn: Callable[[list[Any]], Any] = pad_collate,
    seed: int = 0,
    shuffle: bool = True,
    look_ahead: int | None = None,
    num_replicas: int | None = None,
    rank: int | None = None,
) -> GroupedDataset | GroupedStream:
    """Return a dataset of batches of similar samples. Padded, each batch has at most ``budget``
    elements: the number of samples, times the largest size.

    A size is what padding makes equal: an int for tokens or frames; a tuple of one int for each
    dimension that is padded, such as (height, width) for images, where the largest of each
    dimension counts.

    ``collate_fn`` makes the batch; the default pads tensors with zeros to the largest of the batch.
    Load it with ``batch_size=None``. Other arguments are those of :func:`pack`.

    Raises: TypeError, ValueError: see the message.
    """
    budget, seed = whole("bucket", "budget", budget), whole("bucket", "seed", seed, -math.inf)
    rule = Rule("bucket", budget, collate_fn, "error", seed, shuffle)
    return _grouped(rule, dataset, size_of, look_ahead, num_replicas, rank)


def _grouped(
    rule: Rule,
    dataset: Any,
    size_of: Any,
    look_ahead: int | None,
    num_replicas: int | None,
    rank: int | None,
) -> GroupedDataset | GroupedStream:
    if is_map_style(dataset):
        _refuse(rule.who, dataset, look_ahead=look_ahead, num_replicas=num_replicas, rank=rank)
        return GroupedDataset(dataset, GroupPlan(rule, dataset, size_of))
    if not callable(size_of):
        raise TypeError(f"{rule.who}: for a stream, size_of must be a function of the item.")
    check_whole(rule.who, look_ahead=look_ahead, optional=True)
    own_rank = OwnRank("GroupedStream", num_replicas, rank)
    return GroupedStream(dataset, rule, size_of, int(look_ahead or _LOOK_AHEAD), own_rank)


def _refuse(who: str, dataset: Any, **given: Any) -> None:
    for name, value in given.items():
        if value is not None:
            raise ValueError(
                f"{who}: {name} is for streams; a {type(dataset).__name__} is map-style: all of it "
                f"is planned from its sizes, and sampler() takes the ranks. Leave {name} out, got "
                f"{value!r}."
            )
