"""Load one image in SPDL's layout, with its colours at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ... import io
from ...io._options import RGB24
from ...io._transfer.transfer import check_device_config, to_device

if TYPE_CHECKING:
    from torch import Tensor

    from ...io import CUDAConfig, DecodeConfig, Source


def load_image(
    src: Source,
    *,
    decode_config: DecodeConfig | None = None,
    filter_desc: str | None = RGB24,
    device_config: CUDAConfig | None = None,
    name: str | None = None,
) -> Tensor:
    """Decode one image, as stored or filtered: (H, W, 3), where ``spdl_torch.io.load_image`` gives
    (3, H, W).

    Args:
        src: as in :func:`spdl_torch.io.decode_image`.
        decode_config, filter_desc: of ``decode_packets``. With one of them FFmpeg decodes the
            image; without, it has Pillow's pixels.
        device_config: of ``cuda_config``: where the image goes; None: it stays on the CPU.
        name: of the source in errors; None: its path, or ``<bytes>``.

    Returns: uint8, shape (H, W, 3), contiguous, or what ``filter_desc`` makes of it.
    Raises: as :func:`spdl_torch.io.load_image_batch`.
    """
    if device_config is not None:
        check_device_config(device_config, "load_image")
    if filter_desc == RGB24 and decode_config is None:
        image = io.load_image(src, name=name).permute(1, 2, 0)
    else:
        packets = io.demux_image(src, name=name)
        image = io.convert_frames(io.decode_packets(packets, filter_desc, decode_config))
    return image if device_config is None else to_device(image, device_config)
