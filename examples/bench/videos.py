"""Clips of videos: which frames, made by each library; all give uint8 (16, 224, 224, 3)."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .peers import imported, spdl_decoder

if TYPE_CHECKING:
    from .tables import BenchOptions

PIXELS = 224
FRAMES = 16
SECONDS = 2.0
SUFFIXES = {".mkv", ".mov", ".mp4", ".webm"}
"""No AVI: it does not say when frames are displayed, and each package counts them differently."""


class Request(NamedTuple):
    """One clip, as every row gets it."""

    path: str
    moments: list[float]
    """Seconds: each in the middle of the time for which a frame is displayed."""
    times: list[float]
    """The times at which the same frames begin to be displayed."""
    numbers: list[int]
    """The same, counted from the beginning of the video."""


def clips_of(folder: str, num_clips: int) -> list[Request]:
    """Return the same random clips for every row; whole videos where they are shorter."""
    import av

    rng = random.Random(0)
    facts = []
    for path in paths_in(Path(folder)):
        with av.open(path) as container:
            stream: Any = container.streams.video[0]
            times = sorted(p.pts for p in container.demux(stream) if p.pts is not None)
            facts.append((path, [float(time * stream.time_base) for time in times]))
    requests = []
    for number in range(num_clips):
        path, times = facts[number % len(facts)]
        step = (times[-1] - times[0]) / (len(times) - 1)
        span = min(len(times), round(SECONDS / step))
        first = rng.randint(0, len(times) - span)
        numbers = [first + (2 * k + 1) * span // (2 * FRAMES) for k in range(FRAMES)]
        begins = [times[n] for n in numbers]
        requests.append(Request(path, [t + step / 2 for t in begins], begins, numbers))
    return requests


def our_clip(request: Request) -> Any:
    """Return the clip by one call of ours."""
    from spdl_torch.io import load_clip

    return load_clip(
        request.path,
        lambda info: request.moments,
        width=PIXELS,
        height=PIXELS,
    ).frames


def spdl_clip(request: Request) -> Any:
    """Return the clip by SPDL: a window's frames by their numbers; others are not decoded."""
    import numpy as np

    io = imported("spdl.io")
    # From before the first wanted frame to after the last.
    window = request.times[0] - 1e-3, request.times[-1] + 1e-3
    packets = io.demux_video(request.path, timestamp=window)
    times = np.asarray(packets.get_timestamps())
    indices = np.searchsorted(times, request.moments, side="right") - 1
    scale = io.get_video_filter_desc(
        scale_width=PIXELS, scale_height=PIXELS, scale_algo="bilinear", scale_mode=None
    )
    frames = io.sample_decode_video(packets, indices.tolist(), filter_desc=scale)
    return io.to_torch(io.convert_frames(frames))


def torchcodec_clip(request: Request, mode: str) -> Any:
    """Return the clip by torchcodec, with one FFmpeg thread."""
    resize = imported("torchcodec.transforms").Resize
    decoder = imported("torchcodec.decoders").VideoDecoder(
        request.path,
        dimension_order="NHWC",
        num_ffmpeg_threads=1,
        seek_mode=mode,
        transforms=[resize((PIXELS, PIXELS))],
    )
    return decoder.get_frames_played_at(request.moments).data


def pyav_clip(request: Request) -> Any:
    """Return the clip by PyAV from the keyframe on, resized by swscale: what a user would write."""
    import av
    import torch

    frames = []
    with av.open(request.path) as container:
        stream: Any = container.streams.video[0]
        step = 2 * (request.moments[0] - request.times[0])
        container.seek(int(request.times[0] / stream.time_base), stream=stream)
        remaining = list(request.moments)
        for frame in container.decode(stream):
            while remaining and frame.time is not None and frame.time + step > remaining[0]:
                small = frame.reformat(PIXELS, PIXELS, "rgb24", interpolation="BILINEAR")
                frames.append(torch.from_numpy(small.to_ndarray()))
                remaining.pop(0)
            if not remaining:
                break
    return torch.stack(frames)


def paths_in(folder: Path | str) -> list[str]:
    """Return the videos in a folder and its subfolders, sorted.

    Raises: SystemExit: there are none.
    """
    found = sorted(p for p in Path(folder).rglob("*") if p.suffix.lower() in SUFFIXES)
    if not found:
        raise SystemExit(f"--data: {folder} must hold videos, found none.")
    return list(map(str, found))


def videos(options: BenchOptions, folder: Path) -> dict[str, Any]:
    """Return as settings the user's folder of videos, or a video of our own in ``folder``, read
    once, to cache them; with what SPDL's decoder needs set up."""
    if options.data is None:
        from _moving_noise import write_video

        write_video(folder / "moving.mp4", seconds=3 if options.smoke else 10)
    paths = paths_in(options.data or folder)
    for path in paths:
        Path(path).read_bytes()
    wanted = not options.smoke or any("SPDL" in name for name in options.only)
    return {
        "folder": str(options.data or folder),
        "files": len(paths),
        "no_spdl_decoder": spdl_decoder(folder) if wanted else None,
    }
