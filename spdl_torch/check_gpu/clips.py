"""Check frames of videos that were copied to the device or decoded on it. Needs PyAV."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..io._transfer.transfer import cuda_config
from ..io._video.clips import load_clip, load_clip_batch
from ..io._video.demux import demux_video
from ..io._video.samplers import uniform_frames
from ..io._video.torchcodec_video import check_torchcodec, frames_at
from ..io._video.video import load_video
from ..measuring.videos import write_video
from .correctness import same

if TYPE_CHECKING:
    from torch import Tensor

    from ..io._transfer.transfer import CUDAConfig
    from .gpu import Gpu
    from .sheet import Sheet


def check_clips(gpu: Gpu, sheet: Sheet, device_index: int = 0) -> None:
    """Check video frames that were decoded and copied: they equal the CPU's. Then those that
    torchcodec decoded on the GPU, which converts colours differently: levels of 255, worst frame.
    """
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
    if _takes(video, config, sheet):
        decoded = _frames_of(video, device_config=config, decoder="torchcodec")
        for name, frames in decoded.items():
            levels = (frames.cpu().int() - expected[name].int()).abs().float()
            worst = float(levels.flatten(-3).mean(dim=-1).max())
            sheet.at_most(f"clips_torchcodec_{name}", worst, 4)


def _frames_of(video: bytes, **options: Any) -> dict[str, Tensor]:
    """Return frames by each function that loads some."""
    sampler = uniform_frames(4)
    sized = {**options, "width": 160, "height": 128, "resize": "antialias"}
    return {
        "one": load_clip(video, sampler, **sized).frames,
        "batch": load_clip_batch([video, video], sampler, **sized).frames,
        "video": load_video(video, **options),
    }


def _takes(video: bytes, config: CUDAConfig, sheet: Sheet) -> bool:
    """Return whether torchcodec decodes on the GPU here; if not, add a line that says why."""
    try:
        check_torchcodec(config)
        packets = demux_video(video)
        tick = float(packets.time_base)
        frames = frames_at(video, packets.times[:1], tick, None, config, 1)
    except (ImportError, RuntimeError) as error:
        if "decoder='torchcodec'" not in str(error):
            raise
        sheet.skip("clips_torchcodec", "no torchcodec with CUDA here")
        return False
    if frames is None:
        sheet.fail("clips_torchcodec", "it does not take a common video")
    return frames is not None
