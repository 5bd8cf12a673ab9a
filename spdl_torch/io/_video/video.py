"""Load a whole video, or a window of it, in one call."""

from __future__ import annotations

from typing import TYPE_CHECKING, SupportsFloat

from .._config import RGB24
from .._transfer.transfer import check_device_config, to_device
from .demux import read_window
from .frames import convert_frames, decode_packets
from .opening import position_of, rewind
from .packets import UnsureError

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
    device_config: CUDAConfig | None = None,
    name: str | None = None,
    num_threads: int = 1,
) -> Tensor:
    """Load the frames of a video.

    Args:
        src, timestamp, demux_config, name: as in :func:`demux_video`.
        filter_desc, decode_config, num_threads: as in :func:`decode_packets`.
        device_config: from :func:`cuda_config`: the device for the tensor.

    Returns: as :func:`convert_frames`: uint8 (N, H, W, 3) unless ``filter_desc`` says otherwise.
    Raises: as those three, and as :func:`transfer_tensor`.
    """
    if device_config is not None:
        check_device_config(device_config, "load_video")
    place = position_of(src)
    packets = read_window(src, timestamp, demux_config, None, name)
    try:
        frames = decode_packets(packets, filter_desc, decode_config, num_threads=num_threads)
    except UnsureError:
        if packets.is_whole or place is None:
            raise
        rewind(src, place)
        packets = read_window(src, timestamp, demux_config, None, name, whole=True)
        frames = decode_packets(packets, filter_desc, decode_config, num_threads=num_threads)
    batch = convert_frames(frames)
    return batch if device_config is None else to_device(batch, device_config)
