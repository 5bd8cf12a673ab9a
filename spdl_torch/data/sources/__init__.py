"""Sources of items: files, tar shards, Parquet, any iterable; shuffled and sharded.

Pass a source to ``PipelineBuilder.add_source``; a ``PipelineDataset`` shards it among ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spdl_torch.lazy_names import hand_on

if TYPE_CHECKING:
    from ._base import DataSource as DataSource, ListSource as ListSource
    from ._files import Files as Files
    from ._parquet import Parquet as Parquet
    from ._stream import as_source as as_source
    from ._tar import TarShards as TarShards

hand_on()
