"""The loader and the datasets that trainers hold; built on the engine and on ``io``.

Public names are imported when first used, so importing one module of this package does not import
all others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spdl_torch.lazy_names import hand_on

if TYPE_CHECKING:
    from .caching import CachedDataset as CachedDataset, cached as cached
    from .mixing.mix import mix as mix
    from .mixing.mixed_source import MixedSource as MixedSource
    from .mixing.mixture import Mixture as Mixture, MixtureSampler as MixtureSampler
    from .packing.collate import pad_collate as pad_collate
    from .packing.dataset import GroupedDataset as GroupedDataset, GroupSampler as GroupSampler
    from .packing.pack import GroupedStream as GroupedStream, bucket as bucket, pack as pack
    from .subprocesses import (
        iterate_in_subprocess as iterate_in_subprocess,
        run_pipeline_in_subprocess as run_pipeline_in_subprocess,
    )

hand_on()
