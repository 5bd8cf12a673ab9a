"""``spdl.io``: the names of SPDL's that :mod:`spdl_torch.io` has, and its ``load_image``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..names import look_up

if TYPE_CHECKING:
    from ...io import (
        ArrayInterface,
        CPUBuffer,
        CPUStorage,
        CUDAArrayInterface,
        CUDABuffer,
        CUDAConfig,
        DecodeConfig,
        DemuxConfig,
        ImageCodec,
        ImageFrames,
        ImagePackets,
        NpzFile,
        VideoCodec,
        VideoFrames,
        VideoPackets,
        convert_frames,
        cpu_storage,
        cuda_config,
        decode_config,
        decode_packets,
        demux_config,
        demux_image,
        demux_video,
        get_filter_desc,
        get_video_filter_desc,
        iter_tarfile,
        load_audio,
        load_image_batch,
        load_npy,
        load_npz,
        load_video,
        sample_decode_video,
        to_numpy,
        to_torch,
        transfer_buffer,
        transfer_tensor,
        transfer_tensor_h2d,
    )
    from ._load_image import load_image

__all__ = [
    "ArrayInterface",
    "CPUBuffer",
    "CPUStorage",
    "CUDAArrayInterface",
    "CUDABuffer",
    "CUDAConfig",
    "DecodeConfig",
    "DemuxConfig",
    "ImageCodec",
    "ImageFrames",
    "ImagePackets",
    "NpzFile",
    "VideoCodec",
    "VideoFrames",
    "VideoPackets",
    "convert_frames",
    "cpu_storage",
    "cuda_config",
    "decode_config",
    "decode_packets",
    "demux_config",
    "demux_image",
    "demux_video",
    "get_filter_desc",
    "get_video_filter_desc",
    "iter_tarfile",
    "load_audio",
    "load_image",
    "load_image_batch",
    "load_npy",
    "load_npz",
    "load_video",
    "sample_decode_video",
    "to_numpy",
    "to_torch",
    "transfer_buffer",
    "transfer_tensor",
    "transfer_tensor_h2d",
]

_HOMES = {**dict.fromkeys(__all__, "spdl_torch.io"), "load_image": "._load_image"}


def __getattr__(name: str) -> Any:
    return look_up(__name__, name, modules=("utils",), homes=_HOMES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
