"""Photographs through SPDL's own decoder."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from .images import PIXELS
from .loaders import spdl_batches
from .peers import imported

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .loaders import Batches, Work


def spdl_decoding(work: Work, *, crop: bool, default: bool = False) -> Batches:
    """SPDL's own decoder in its pipeline, one batch per task.

    Resizing: ``load_image_batch``, bilinear and not padded, or with its ``default`` filter
    (bicubic, padded). Cropping: a filter for each picture, since a batch has only one filter.
    """
    return spdl_batches(work, partial(_load, work.dataset.paths, crop=crop, default=default))


def _load(paths: Sequence[str], indices: Sequence[int], *, crop: bool, default: bool) -> Any:
    io = imported("spdl.io")
    group = [paths[index] for index in indices]
    if crop:
        return io.to_torch(io.convert_frames([_crop(path) for path in group]))
    options: dict[str, Any] = {"width": PIXELS, "height": PIXELS}
    if not default:
        options["filter_desc"] = io.get_video_filter_desc(
            scale_width=PIXELS,
            scale_height=PIXELS,
            scale_algo="bilinear",
            scale_mode=None,
            pix_fmt="rgb24",
        )
    return io.to_torch(io.load_image_batch(group, **options))


def _crop(path: str) -> Any:
    from spdl_torch.io import random_resized_crop

    io = imported("spdl.io")
    packets = io.demux_image(path)
    top, left, height, width, flip = random_resized_crop(packets.height, packets.width)
    description = (
        f"crop={width}:{height}:{left}:{top},scale={PIXELS}:{PIXELS}:flags=bilinear,"
        f"{'hflip,' if flip else ''}format=rgb24"
    )
    return io.decode_packets(packets, filter_desc=description)
