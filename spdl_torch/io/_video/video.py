"""Load a whole video, or a window of it, in one call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, SupportsFloat

from spdl_torch.errors import UnsupportedOptionError

from .._config import RGB24
from .._source import source_name
from .._transfer.transfer import check_device_config, to_device
from .demux import demux_known
from .frames import convert_frames, decode_packets
from .opening import position_of, rewind
from .packets import UnsureError
from .torchcodec_video import (
    SURE_FORMATS,
    check_decoder,
    check_torchcodec,
    frames_at,
    readable,
)

if TYPE_CHECKING:
    from torch import Tensor

    from .._config import DecodeConfig, DemuxConfig
    from .._source import Source
    from .._transfer.transfer import CUDAConfig


def load_video(
    src: Source,
    timestamp: tuple[SupportsFloat | str, SupportsFloat | str] | None = None,
    *,
    demux_config: DemuxConfig | None = None,
    decode_config: DecodeConfig | None = None,
    filter_desc: str | None = RGB24,
    decoder: Literal["ffmpeg", "torchcodec"] = "ffmpeg",
    device_config: CUDAConfig | None = None,
    name: str | None = None,
    num_threads: int = 1,
) -> Tensor:
    """Load the frames of a video.

    Args:
        src, timestamp, demux_config, name: as in :func:`demux_video`.
        filter_desc, decode_config, num_threads: as in :func:`decode_packets`.
        decoder: as in :func:`load_clip`; "torchcodec" decodes to RGB in the video's size, and takes
            neither configurations nor another ``filter_desc``.
        device_config: from :func:`cuda_config`: the device for the tensor.

    Returns: as :func:`convert_frames`: uint8 (N, H, W, 3) unless ``filter_desc`` says otherwise.
    Raises: as those three, and as :func:`transfer_tensor`; of ``decoder`` as :func:`load_clip`.
    """
    check_decoder(decoder, "load_video")
    if device_config is not None:
        check_device_config(device_config, "load_video")
    batch = None
    if decoder == "torchcodec":
        _check_torchcodec(demux_config, decode_config, filter_desc)
        check_torchcodec(device_config)
        name, src = name or source_name(src), readable(src)
    place = position_of(src)
    packets, container_format = demux_known(src, timestamp, demux_config, None, name)
    if decoder == "torchcodec" and container_format in SURE_FORMATS and packets.is_plain:
        tick = float(packets.time_base)
        batch = frames_at(src, packets.times, tick, None, device_config, num_threads)
    if batch is None:
        try:
            frames = decode_packets(packets, filter_desc, decode_config, num_threads=num_threads)
        except UnsureError:
            if packets.is_whole or place is None:
                raise
            rewind(src, place)
            packets, _ = demux_known(src, timestamp, demux_config, None, name, whole=True)
            frames = decode_packets(packets, filter_desc, decode_config, num_threads=num_threads)
        batch = convert_frames(frames)
    if device_config is None or batch.device.type != "cpu":
        return batch
    return to_device(batch, device_config)


def _check_torchcodec(
    demux_config: DemuxConfig | None, decode_config: DecodeConfig | None, filter_desc: str | None
) -> None:
    refused = {
        "demux_config": demux_config,
        "decode_config": decode_config,
        "filter_desc": None if filter_desc == RGB24 else repr(filter_desc),
    }
    for option, value in refused.items():
        if value is not None:
            raise UnsupportedOptionError(
                f"load_video: decoder='torchcodec' goes without {option}, got {value}. Leave it "
                "out, or leave decoder= out."
            )
