"""Write a video that costs a decoder what Kinetics-400's cost it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import av
import numpy as np
import torch
from torch.nn.functional import interpolate

if TYPE_CHECKING:
    from pathlib import Path


_RATE = 28  # frames a second


def write_video(path: Path, *, seconds: int = 10) -> None:
    """Write a moving picture of noise, with the size and keyframe interval of Kinetics-400."""
    rng = np.random.default_rng(0)
    gray = rng.integers(40, 216, (1, 1, 40, 60)) + rng.integers(-30, 31, (1, 3, 10, 15)).repeat(
        4, axis=2
    ).repeat(4, axis=3)
    coarse = torch.from_numpy(gray).float()
    canvas = interpolate(coarse, (400, 600), mode="bicubic").clamp(0, 255)[0].permute(1, 2, 0)
    with av.open(path, "w") as container:
        stream: Any = container.add_stream("libx264", rate=_RATE, options={"crf": "23"})
        stream.width, stream.height, stream.pix_fmt = 340, 256, "yuv420p"
        stream.codec_context.gop_size = 70
        for number in range(seconds * _RATE):
            top, left = (number * 2) % 144, (number * 3) % 260
            view = canvas[top : top + 256, left : left + 340]
            noisy = view + torch.from_numpy(rng.normal(0, 4, tuple(view.shape)))
            picture = noisy.clamp(0, 255).to(torch.uint8).numpy()
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
