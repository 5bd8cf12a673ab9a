"""``spdl.io``: the names of SPDL's that :mod:`spdl_torch.io` has, and its ``load_image``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spdl_torch.lazy_names import hand_on

if TYPE_CHECKING:
    from ...io import (
        ArrayInterface as ArrayInterface,
        CPUBuffer as CPUBuffer,
        CPUStorage as CPUStorage,
        CUDAArrayInterface as CUDAArrayInterface,
        CUDABuffer as CUDABuffer,
        CUDAConfig as CUDAConfig,
        DecodeConfig as DecodeConfig,
        ImageCodec as ImageCodec,
        ImageFrames as ImageFrames,
        ImagePackets as ImagePackets,
        NpzFile as NpzFile,
        VideoCodec as VideoCodec,
        VideoFrames as VideoFrames,
        VideoPackets as VideoPackets,
        convert_frames as convert_frames,
        cpu_storage as cpu_storage,
        cuda_config as cuda_config,
        decode_config as decode_config,
        decode_packets as decode_packets,
        demux_image as demux_image,
        demux_video as demux_video,
        get_filter_desc as get_filter_desc,
        get_video_filter_desc as get_video_filter_desc,
        iter_tarfile as iter_tarfile,
        load_audio as load_audio,
        load_image_batch as load_image_batch,
        load_npy as load_npy,
        load_npz as load_npz,
        load_video as load_video,
        sample_decode_video as sample_decode_video,
        to_numpy as to_numpy,
        to_torch as to_torch,
        transfer_buffer as transfer_buffer,
        transfer_tensor as transfer_tensor,
        transfer_tensor_h2d as transfer_tensor_h2d,
    )
    from . import utils as utils
    from ._load_image import load_image as load_image

hand_on()
