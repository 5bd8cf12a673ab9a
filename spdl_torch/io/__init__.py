"""Bytes to tensors without the GIL: images, videos, arrays, and the way to the GPU.

Names are imported on first use: decoding videos needs PyAV, decoding images does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spdl_torch.lazy_names import hand_on

if TYPE_CHECKING:
    from ._array.npy import load_npy as load_npy
    from ._array.npz import NpzFile as NpzFile, load_npz as load_npz
    from ._image.decode import decode_image as decode_image
    from ._image.geometry import Crop as Crop, random_resized_crop as random_resized_crop
    from ._image.images import (
        image_loader as image_loader,
        load_image as load_image,
        load_image_batch as load_image_batch,
    )
    from ._options import DecodeConfig as DecodeConfig, decode_config as decode_config
    from ._remote import Reader as Reader
    from ._source import Source as Source
    from ._storage import (
        ArrayInterface as ArrayInterface,
        CPUBuffer as CPUBuffer,
        CPUStorage as CPUStorage,
        CUDAArrayInterface as CUDAArrayInterface,
        CUDABuffer as CUDABuffer,
        Storage as Storage,
        batch_storage as batch_storage,
        cpu_storage as cpu_storage,
        to_numpy as to_numpy,
        to_torch as to_torch,
    )
    from ._tar import iter_tarfile as iter_tarfile
    from ._transfer.transfer import (
        CUDAConfig as CUDAConfig,
        Staged as Staged,
        Transfer as Transfer,
        cuda_config as cuda_config,
        transfer_buffer as transfer_buffer,
        transfer_tensor as transfer_tensor,
        transfer_tensor_h2d as transfer_tensor_h2d,
    )
    from ._video.audio import load_audio as load_audio
    from ._video.clips import (
        Clip as Clip,
        load_clip as load_clip,
        load_clip_batch as load_clip_batch,
    )
    from ._video.codec import ImageCodec as ImageCodec, VideoCodec as VideoCodec
    from ._video.filters import (
        get_filter_desc as get_filter_desc,
        get_video_filter_desc as get_video_filter_desc,
    )
    from ._video.frames import (
        ImageFrames as ImageFrames,
        VideoFrames as VideoFrames,
        convert_frames as convert_frames,
    )
    from ._video.packets import ImagePackets as ImagePackets, VideoPackets as VideoPackets
    from ._video.samplers import (
        ClipSampler as ClipSampler,
        VideoInfo as VideoInfo,
        random_clip as random_clip,
        strided_frames as strided_frames,
        uniform_frames as uniform_frames,
    )
    from ._video.video import (
        decode_packets as decode_packets,
        demux_image as demux_image,
        demux_video as demux_video,
        load_video as load_video,
        sample_decode_video as sample_decode_video,
    )

hand_on()
