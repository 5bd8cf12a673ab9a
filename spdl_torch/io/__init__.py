"""Bytes to tensors without the GIL: images, videos, arrays, and the way to the GPU.

Names are imported when they are first used: what decodes videos needs PyAV, what decodes images
does not.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spdl_torch.io._clips import Clip, load_clip
    from spdl_torch.io._decode import decode_image
    from spdl_torch.io._demux import demux_video
    from spdl_torch.io._filters import get_filter_desc, get_video_filter_desc
    from spdl_torch.io._frames import (
        ImageFrames,
        VideoFrames,
        convert_frames,
        decode_packets,
        sample_decode_video,
        to_torch,
    )
    from spdl_torch.io._geometry import Crop, random_resized_crop, random_resized_crop_params
    from spdl_torch.io._images import image_loader, load_image, load_image_batch
    from spdl_torch.io._npy import load_npy
    from spdl_torch.io._npz import NpzFile, load_npz
    from spdl_torch.io._nvjpeg import load_image_batch_nvjpeg
    from spdl_torch.io._packets import VideoPackets
    from spdl_torch.io._read import Reader
    from spdl_torch.io._samplers import (
        ClipSampler,
        VideoInfo,
        random_clip,
        strided_frames,
        uniform_frames,
    )
    from spdl_torch.io._source import Source
    from spdl_torch.io._tar import iter_tarfile
    from spdl_torch.io._transfer import (
        CUDAConfig,
        Staged,
        Transfer,
        cuda_config,
        transfer_buffer,
        transfer_tensor,
        transfer_tensor_h2d,
    )
    from spdl_torch.io._video import load_video
    from spdl_torch.io._video_codec import VideoCodec

__all__ = [
    "CUDAConfig",
    "Clip",
    "ClipSampler",
    "Crop",
    "ImageFrames",
    "NpzFile",
    "Reader",
    "Source",
    "Staged",
    "Transfer",
    "VideoCodec",
    "VideoFrames",
    "VideoInfo",
    "VideoPackets",
    "convert_frames",
    "cuda_config",
    "decode_image",
    "decode_packets",
    "demux_video",
    "get_filter_desc",
    "get_video_filter_desc",
    "image_loader",
    "iter_tarfile",
    "load_clip",
    "load_image",
    "load_image_batch",
    "load_image_batch_nvjpeg",
    "load_npy",
    "load_npz",
    "load_video",
    "random_clip",
    "random_resized_crop",
    "random_resized_crop_params",
    "sample_decode_video",
    "strided_frames",
    "to_torch",
    "transfer_buffer",
    "transfer_tensor",
    "transfer_tensor_h2d",
    "uniform_frames",
]

_HOMES = {
    "_clips": ("Clip", "load_clip"),
    "_decode": ("decode_image",),
    "_demux": ("demux_video",),
    "_filters": ("get_filter_desc", "get_video_filter_desc"),
    "_frames": (
        "ImageFrames",
        "VideoFrames",
        "convert_frames",
        "decode_packets",
        "sample_decode_video",
        "to_torch",
    ),
    "_geometry": ("Crop", "random_resized_crop", "random_resized_crop_params"),
    "_images": ("image_loader", "load_image", "load_image_batch"),
    "_npy": ("load_npy",),
    "_npz": ("NpzFile", "load_npz"),
    "_nvjpeg": ("load_image_batch_nvjpeg",),
    "_packets": ("VideoPackets",),
    "_read": ("Reader",),
    "_samplers": ("ClipSampler", "VideoInfo", "random_clip", "strided_frames", "uniform_frames"),
    "_source": ("Source",),
    "_tar": ("iter_tarfile",),
    "_transfer": (
        "CUDAConfig",
        "Staged",
        "Transfer",
        "cuda_config",
        "transfer_buffer",
        "transfer_tensor",
        "transfer_tensor_h2d",
    ),
    "_video": ("load_video",),
    "_video_codec": ("VideoCodec",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME_OF[name]}", __name__), name)
    globals()[name] = value  # from now on without this detour
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
