"""Clips of videos: 16 frames out of 2 seconds, uint8 at 224 x 224, on two threads: clips a second.

Every row does the same work: open a video file, go to a random place, decode what is needed for 16
frames spread over the next 2 seconds, resize them to 224 x 224 and put them into one tensor. Two
threads share the list of clips, which is the same for every row; FFmpeg has one thread a decoder.

- ours, load_clip: ``spdl_torch.io.load_clip``, resized by swscale, and by torch's antialiased
  ``interpolate``;
- ours, SPDL's calls: ``demux_video``, then ``sample_decode_video``;
- SPDL, ``demux_video`` and ``sample_decode_video``; and its ``load_video``, of whose frames 16 are
  taken; both bilinear; the faster one counts;
- torchcodec's ``VideoDecoder``, both seek modes, with its own ``Resize`` and with the antialiased
  ``interpolate``; the fastest one counts.

SPDL and torchcodec need FFmpeg's libraries; without any on the machine, both use those of PyAV.

Each measurement is one pass in a fresh process. ``PSNR`` is that of the first clips against RGB
frames resized by ``interpolate(antialias=True)`` in floating point.

Goals: 1.8 times SPDL, 1.3 times torchcodec.

    python examples/benchmark_video.py [--data DIR] [--rounds N] [--json FILE] [--smoke]
"""

from __future__ import annotations

import contextlib
import random
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from _bench import (
    Goal,
    Metric,
    Report,
    argument_parser,
    in_fresh_process,
    installed,
    interleaved,
    left_out,
    machine,
    run_program,
    spdl_decoder,
)
from torch.nn.functional import interpolate

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

PIXELS = 224
FRAMES = 16
SECONDS = 2.0
WORKERS = 2
CLIPS_COMPARED = 4
SUFFIXES = {".mkv", ".mov", ".mp4", ".webm"}
"""No AVI: it does not say when frames are displayed, and each package counts in its own way."""
METRICS = (
    Metric(key="clips_per_second", heading="clips/s"),
    Metric(key="cpu_ms", heading="CPU ms/clip", digits=1),
    Metric(key="psnr", heading="PSNR, dB", digits=1),
)


class Request(NamedTuple):
    """One clip, as every row gets it."""

    path: str
    moments: list[float]
    """Seconds: each in the middle of the time for which a frame is displayed."""
    times: list[float]
    """When the same frames begin to be displayed."""
    numbers: list[int]
    """The same, counted from the beginning of the video."""


def main(options: argparse.Namespace) -> Report:
    """Measure every decoder that is installed."""
    num_clips = 6 if options.smoke else 80
    with spdl_decoder() as no_spdl, videos(options.data) as folder:
        missing = {}
        if no_spdl:
            missing["SPDL"] = no_spdl
        if not installed("torchcodec"):
            missing["torchcodec"] = left_out("torchcodec", "torchcodec")
        rows = [row for row in ROWS if row.partition(",")[0] not in missing]
        measure_one = partial(in_fresh_process, __file__, folder=str(folder), num_clips=num_clips)
        with contextlib.suppress(StopIteration):
            trial = next(row for row in rows if row.startswith("torchcodec"))
            try:
                in_fresh_process(__file__, row=trial, folder=str(folder), num_clips=1)
            except RuntimeError:
                missing["torchcodec"] = "torchcodec found no FFmpeg, so it is left out."
                rows = [row for row in rows if not row.startswith("torchcodec")]
        report = Report(
            title=f"{FRAMES} frames of {SECONDS:g} seconds at {PIXELS} x {PIXELS}, "
            f"{WORKERS} threads",
            metrics=METRICS,
            settings=machine(files=len(paths_in(folder)), clips=num_clips, rounds=options.rounds),
            remarks=list(missing.values()),
        )
        interleaved(report, rows, options.rounds, lambda row: measure_one(row=row))
    goal = partial(Goal, metric="clips_per_second", row=OURS)
    for peer, at_least in (("SPDL", 1.8), ("torchcodec", 1.3)):
        speeds = {
            row: report.median(row, "clips_per_second") for row in rows if row.startswith(peer)
        }
        best = max(speeds, key=speeds.__getitem__, default=None)
        if best is not None:
            report.goals += [
                goal(over=best, at_least=at_least),
                goal(row=OURS_ANTIALIAS, over=best),
                goal(row=OURS_CALLS, over=best),
            ]
    report.goals.append(Goal(metric="psnr", row=OURS, at_least=42))
    return report


def measure(row: str, folder: str, num_clips: int) -> dict[str, float]:
    """One pass over ``num_clips`` clips."""
    from spdl_torch.demo.machine import cpu_seconds

    torch.set_num_threads(1)
    requests = clips_of(folder, num_clips)
    load = ROWS[row]
    for request in requests[:2]:
        load(request)  # imports, caches
    cpu, start = cpu_seconds(), time.perf_counter()
    _run(load, requests)
    wall, cpu = time.perf_counter() - start, cpu_seconds() - cpu
    compared = requests[:CLIPS_COMPARED]
    return {
        "clips_per_second": num_clips / wall,
        "cpu_ms": cpu / num_clips * 1e3,
        "psnr": min(psnr(load(request), reference(request)) for request in compared),
    }


def _run(load: Callable[[Request], torch.Tensor], requests: list[Request]) -> None:
    remaining, lock = iter(requests), threading.Lock()
    errors: list[BaseException] = []

    def work() -> None:
        while not errors:
            with lock:
                request = next(remaining, None)
            if request is None:
                return
            try:
                batch = load(request)
                assert batch.shape == (FRAMES, PIXELS, PIXELS, 3), batch.shape
            except BaseException as error:
                errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(WORKERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def clips_of(folder: str, num_clips: int) -> list[Request]:
    """The same random clips for every row; whole videos where they are shorter."""
    import av

    rng = random.Random(0)
    facts = []
    for path in paths_in(Path(folder)):
        with av.open(path) as container:
            stream = container.streams.video[0]
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


def our_clip(request: Request, resize: Any = "swscale") -> torch.Tensor:
    """One call."""
    from spdl_torch.io import load_clip

    clip = load_clip(
        request.path, lambda info: request.moments, width=PIXELS, height=PIXELS, resize=resize
    )
    return clip.frames


def sampled(request: Request, io: Any) -> torch.Tensor:
    """SPDL's calls, on either package: the frames of a window by their numbers."""
    packets = io.demux_video(request.path, timestamp=_window(request))
    times = np.asarray(packets.get_timestamps())
    indices = np.searchsorted(times, request.moments, side="right") - 1
    scale = io.get_video_filter_desc(
        scale_width=PIXELS, scale_height=PIXELS, scale_algo="bilinear", scale_mode=None
    )
    frames = io.sample_decode_video(packets, indices.tolist(), filter_desc=scale)
    return io.to_torch(io.convert_frames(frames))


def our_calls(request: Request) -> torch.Tensor:
    """Ours, called as SPDL."""
    import spdl_torch.io

    return sampled(request, spdl_torch.io)


def spdl_sampled(request: Request) -> torch.Tensor:
    """SPDL decodes the frames that are wanted."""
    import spdl.io

    return sampled(request, spdl.io)


def spdl_loaded(request: Request) -> torch.Tensor:
    """SPDL decodes the window and resizes all of it; 16 frames are taken."""
    import spdl.io

    scale = spdl.io.get_video_filter_desc(
        scale_width=PIXELS, scale_height=PIXELS, scale_algo="bilinear", scale_mode=None
    )
    buffer = spdl.io.load_video(request.path, _window(request), filter_desc=scale)
    first = request.numbers[0]
    return spdl.io.to_torch(buffer)[[number - first for number in request.numbers]]


def torchcodec(request: Request, mode: str, *, own_resize: bool) -> torch.Tensor:
    """torchcodec, one FFmpeg thread."""
    from torchcodec.decoders import VideoDecoder
    from torchcodec.transforms import Resize

    decoder = VideoDecoder(
        request.path,
        dimension_order="NHWC",
        num_ffmpeg_threads=1,
        seek_mode=mode,
        transforms=[Resize((PIXELS, PIXELS))] if own_resize else None,
    )
    frames = decoder.get_frames_played_at(request.moments).data
    return frames if own_resize else antialiased(frames)


def antialiased(frames: torch.Tensor) -> torch.Tensor:
    """uint8, shape (T, 224, 224, 3)."""
    size = (PIXELS, PIXELS)
    resized = interpolate(frames.permute(0, 3, 1, 2), size, mode="bilinear", antialias=True)
    return resized.permute(0, 2, 3, 1)


def _window(request: Request) -> tuple[float, float]:
    """From before the first wanted frame to after the last."""
    return request.times[0] - 1e-3, request.times[-1] + 1e-3


def reference(request: Request) -> torch.Tensor:
    """PyAV decodes everything; resized in floating point."""
    import av

    wanted = set(request.numbers)
    with av.open(request.path) as container:
        frames = [
            torch.from_numpy(frame.to_ndarray(format="rgb24"))
            for number, frame in enumerate(container.decode(video=0))
            if number in wanted
        ]
    resized = antialiased(torch.stack(frames).float())
    return resized.round()


def psnr(frames: torch.Tensor, expected: torch.Tensor) -> float:
    """In decibels; at most 99."""
    error = (frames.float() - expected).square().mean().item()
    return 99.0 if error == 0 else min(99.0, 10 * np.log10(255**2 / error))


def paths_in(folder: Path | str) -> list[str]:
    """The videos of a folder and its folders, sorted.

    Raises: SystemExit: there are none.
    """
    found = sorted(p for p in Path(folder).rglob("*") if p.suffix.lower() in SUFFIXES)
    if not found:
        raise SystemExit(f"--data: {folder} must hold videos, found none.")
    return list(map(str, found))


@contextlib.contextmanager
def videos(folder: Path | None) -> Iterator[Path]:
    """The user's folder of videos, or one of our own; read once, so they are cached."""
    with contextlib.ExitStack() as stack:
        if folder is None:
            temporary = tempfile.TemporaryDirectory(prefix="spdl-torch-bench-")
            folder = Path(stack.enter_context(temporary))
            write_video(folder / "moving.mp4")
        for path in paths_in(folder):
            Path(path).read_bytes()
        yield folder


def write_video(path: Path, *, seconds: int = 10, rate: int = 28) -> None:
    """A picture of noise that moves, as large and as often a keyframe as in Kinetics-400."""
    import av

    rng = np.random.default_rng(0)
    gray = rng.integers(40, 216, (1, 1, 40, 60)) + rng.integers(-30, 31, (1, 3, 10, 15)).repeat(
        4, axis=2
    ).repeat(4, axis=3)
    coarse = torch.from_numpy(gray).float()
    canvas = interpolate(coarse, (400, 600), mode="bicubic").clamp(0, 255)[0].permute(1, 2, 0)
    with av.open(path, "w") as container:
        stream: Any = container.add_stream("libx264", rate=rate, options={"crf": "23"})
        stream.width, stream.height, stream.pix_fmt = 340, 256, "yuv420p"
        stream.codec_context.gop_size = 70
        for number in range(seconds * rate):
            top, left = (number * 2) % 144, (number * 3) % 260
            view = canvas[top : top + 256, left : left + 340]
            noisy = view + torch.from_numpy(rng.normal(0, 4, tuple(view.shape)))
            picture = noisy.clamp(0, 255).to(torch.uint8).numpy()
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


OURS = "ours, load_clip"
OURS_ANTIALIAS = "ours, load_clip, antialias"
OURS_CALLS = "ours, SPDL's calls"
ROWS: dict[str, Callable[[Request], torch.Tensor]] = {
    OURS: our_clip,
    OURS_ANTIALIAS: partial(our_clip, resize="antialias"),
    OURS_CALLS: our_calls,
    "SPDL, sample_decode_video": spdl_sampled,
    "SPDL, load_video": spdl_loaded,
    "torchcodec, approximate": partial(torchcodec, mode="approximate", own_resize=True),
    "torchcodec, exact": partial(torchcodec, mode="exact", own_resize=True),
    "torchcodec, approximate, interpolate": partial(
        torchcodec, mode="approximate", own_resize=False
    ),
}


if __name__ == "__main__":
    parser = argument_parser(__doc__, rounds=5, data=False)
    parser.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help="a folder of videos (default: one made for the occasion, removed at the end)",
    )
    run_program(main, parser, child=measure)
