"""Bytes to tensors without the GIL: images, videos, arrays, and the way to the GPU.

Names are imported on first use: decoding videos needs PyAV, decoding images does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import spdl_torch.lazy_names as lazy_names

if TYPE_CHECKING:
    from spdl_torch.io._array.npy import load_npy
    from spdl_torch.io._array.npz import NpzFile, load_npz
    from spdl_torch.io._config import DecodeConfig, DemuxConfig, decode_config, demux_config
    from spdl_torch.io._image.codec import image_codec
    from spdl_torch.io._image.decode import decode_image
    from spdl_torch.io._image.geometry import Crop, random_resized_crop, random_resized_crop_params
    from spdl_torch.io._image.images import image_loader, load_image, load_image_batch
    from spdl_torch.io._read import Reader
    from spdl_torch.io._source import Source
    from spdl_torch.io._storage import CPUStorage, Storage, batch_storage, cpu_storage
    from spdl_torch.io._tar import iter_tarfile
    from spdl_torch.io._transfer.transfer import (
        CUDAConfig,
        Staged,
        Transfer,
        cuda_config,
        transfer_buffer,
        transfer_tensor,
        transfer_tensor_h2d,
    )
    from spdl_torch.io._types import ArrayInterface, CPUBuffer, CUDAArrayInterface, CUDABuffer
    from spdl_torch.io._video.audio import load_audio
    from spdl_torch.io._video.clips import Clip, load_clip, load_clip_batch
    from spdl_torch.io._video.codec import ImageCodec, VideoCodec
    from spdl_torch.io._video.demux import demux_video
    from spdl_torch.io._video.filters import get_filter_desc, get_video_filter_desc
    from spdl_torch.io._video.frames import (
        ImageFrames,
        VideoFrames,
        convert_frames,
        decode_packets,
        sample_decode_video,
        to_numpy,
        to_torch,
    )
    from spdl_torch.io._video.image import demux_image
    from spdl_torch.io._video.packets import ImagePackets, VideoPackets
    from spdl_torch.io._video.samplers import (
        ClipSampler,
        VideoInfo,
        random_clip,
        strided_frames,
        uniform_frames,
    )
    from spdl_torch.io._video.video import load_video

__all__ = [
    "ArrayInterface",
    "CPUBuffer",
    "CPUStorage",
    "CUDAArrayInterface",
    "CUDABuffer",
    "CUDAConfig",
    "Clip",
    "ClipSampler",
    "Crop",
    "DecodeConfig",
    "DemuxConfig",
    "ImageCodec",
    "ImageFrames",
    "ImagePackets",
    "NpzFile",
    "Reader",
    "Source",
    "Staged",
    "Storage",
    "Transfer",
    "VideoCodec",
    "VideoFrames",
    "VideoInfo",
    "VideoPackets",
    "batch_storage",
    "convert_frames",
    "cpu_storage",
    "cuda_config",
    "decode_config",
    "decode_image",
    "decode_packets",
    "demux_config",
    "demux_image",
    "demux_video",
    "get_filter_desc",
    "get_video_filter_desc",
    "image_codec",
    "image_loader",
    "iter_tarfile",
    "load_audio",
    "load_clip",
    "load_clip_batch",
    "load_image",
    "load_image_batch",
    "load_npy",
    "load_npz",
    "load_video",
    "random_clip",
    "random_resized_crop",
    "random_resized_crop_params",
    "sample_decode_video",
    "strided_frames",
    "to_numpy",
    "to_torch",
    "transfer_buffer",
    "transfer_tensor",
    "transfer_tensor_h2d",
    "uniform_frames",
]

_HOMES = {
    "_config": ("DecodeConfig", "DemuxConfig", "decode_config", "demux_config"),
    "_storage": ("CPUStorage", "Storage", "batch_storage", "cpu_storage"),
    "_types": ("ArrayInterface", "CPUBuffer", "CUDAArrayInterface", "CUDABuffer"),
    "_video.image": ("demux_image",),
    "_video.clips": ("Clip", "load_clip", "load_clip_batch"),
    "_image.codec": ("image_codec",),
    "_image.decode": ("decode_image",),
    "_video.demux": ("demux_video",),
    "_video.filters": ("get_filter_desc", "get_video_filter_desc"),
    "_video.frames": (
        "ImageFrames",
        "VideoFrames",
        "convert_frames",
        "decode_packets",
        "sample_decode_video",
        "to_numpy",
        "to_torch",
    ),
    "_image.geometry": ("Crop", "random_resized_crop", "random_resized_crop_params"),
    "_image.images": ("image_loader", "load_image", "load_image_batch"),
    "_array.npy": ("load_npy",),
    "_array.npz": ("NpzFile", "load_npz"),
    "_video.packets": ("ImagePackets", "VideoPackets"),
    "_read": ("Reader",),
    "_video.samplers": (
        "ClipSampler",
        "VideoInfo",
        "random_clip",
        "strided_frames",
        "uniform_frames",
    ),
    "_source": ("Source",),
    "_tar": ("iter_tarfile",),
    "_transfer.transfer": (
        "CUDAConfig",
        "Staged",
        "Transfer",
        "cuda_config",
        "transfer_buffer",
        "transfer_tensor",
        "transfer_tensor_h2d",
    ),
    "_video.audio": ("load_audio",),
    "_video.video": ("load_video",),
    "_video.codec": ("ImageCodec", "VideoCodec"),
}
_HOME_OF = {name: f".{home}" for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    return lazy_names.import_name(__name__, _HOME_OF, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
