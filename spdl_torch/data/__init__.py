"""The loader and the datasets that trainers hold; built on the engine and on ``io``.

Public names are imported when first used, so importing one module of this package does not import
all others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import spdl_torch.lazy_names as lazy_names

if TYPE_CHECKING:
    from .caching.dataset import CachedDataset, cached
    from .mixing.mix import mix
    from .mixing.mixture import Mixture, MixtureSampler
    from .mixing.streams import MixedIterable, MixedSource
    from .packing.collate import pad_collate
    from .packing.dataset import GroupedDataset, GroupSampler
    from .packing.pack import bucket, pack
    from .packing.stream import GroupedStream
    from .subprocesses.pipelines import iterate_in_subprocess, run_pipeline_in_subprocess

__all__ = [
    "CachedDataset",
    "GroupSampler",
    "GroupedDataset",
    "GroupedStream",
    "MixedIterable",
    "MixedSource",
    "Mixture",
    "MixtureSampler",
    "bucket",
    "cached",
    "iterate_in_subprocess",
    "mix",
    "pack",
    "pad_collate",
    "run_pipeline_in_subprocess",
]

_HOMES = {
    "CachedDataset": ".caching.dataset",
    "GroupSampler": ".packing.dataset",
    "GroupedDataset": ".packing.dataset",
    "GroupedStream": ".packing.stream",
    "bucket": ".packing.pack",
    "pack": ".packing.pack",
    "pad_collate": ".packing.collate",
    "MixedIterable": ".mixing.streams",
    "MixedSource": ".mixing.streams",
    "Mixture": ".mixing.mixture",
    "MixtureSampler": ".mixing.mixture",
    "cached": ".caching.dataset",
    "iterate_in_subprocess": ".subprocesses.pipelines",
    "run_pipeline_in_subprocess": ".subprocesses.pipelines",
    "mix": ".mixing.mix",
}


def __getattr__(name: str) -> Any:
    return lazy_names.import_name(__name__, _HOMES, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
