"""Check frames of videos that were copied to the device or decoded on it. Needs PyAV."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..io._transfer.transfer import cuda_config
from ..io._video.clips import load_clip, load_clip_batch
from ..io._video.frames import load_video
from ..io._video.samplers import uniform_frames
from ..measuring.videos import write_video
from .correctness import same

if TYPE_CHECKING:
    from torch import Tensor

    from .gpu import Gpu
    from .sheet import Sheet


def check_clips(gpu: Gpu, sheet: Sheet, device_index: int = 0) -> None:
    """Check video frames that were decoded and copied: they equal the CPU's."""
    with tempfile.TemporaryDirectory() as folder:
        write_video(path := Path(folder) / "moving.mp4", seconds=2)
        video = path.read_bytes()
    config, expected = cuda_config(device_index), _frames_of(video)
    copied = _frames_of(video, device_config=config)
    wrong = 0
    for name, frames in copied.items():
        is_there = gpu.index_of(frames) == device_index
        wrong += not (is_there and same(expected[name], frames))
    sheet.at_most("clips_copied", wrong, 0)


def _frames_of(video: bytes, **options: Any) -> dict[str, Tensor]:
    """Return frames by each function that loads some."""
    sampler = uniform_frames(4)
    sized = {**options, "width": 160, "height": 128, "resize": "antialias"}
    return {
        "one": load_clip(video, sampler, **sized).frames,
        "batch": load_clip_batch([video, video], sampler, **sized).frames,
        "video": load_video(video, **options),
    }
