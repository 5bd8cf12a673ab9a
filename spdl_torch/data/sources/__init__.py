"""Sources of items: files, lists of files, tar shards, Parquet, any iterable; shuffled and sharded.

Pass a source to ``PipelineBuilder.add_source``; a ``PipelineDataset`` shards it among ranks.
"""

from spdl_torch.data.sources._base import DataSource
from spdl_torch.data.sources._files import FileList, Files
from spdl_torch.data.sources._list import ListSource
from spdl_torch.data.sources._parquet import Parquet
from spdl_torch.data.sources._shard import read_samples
from spdl_torch.data.sources._stream import as_source
from spdl_torch.data.sources._tar import TarShards

__all__ = [
    "DataSource",
    "FileList",
    "Files",
    "ListSource",
    "Parquet",
    "TarShards",
    "as_source",
    "read_samples",
]
